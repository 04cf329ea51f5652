// Requests to the server. Paths are relative, so that the page works behind a path of a proxy.

import {$} from "./dom.js";

const KEY = "outrider.key";  // in the storage of the tab

let asked = null;  // the promise of a key that the page asks for

const headers = () => {
  const key = sessionStorage.getItem(KEY);
  return key ? {authorization: "Bearer " + key} : {};
};

// Ask for the API key. Return whether the user gave one.
function askKey(message) {
  asked ??= new Promise((resolve) => {
    $("key-error").textContent = message;
    $("ask-key").returnValue = "";
    $("ask-key").showModal();
    $("ask-key").onclose = () => {
      asked = null;
      const given = $("ask-key").returnValue === "ok" && $("key").value;
      if (given) sessionStorage.setItem(KEY, given);
      resolve(Boolean(given));
    };
  });
  return asked;
}

// Return the response to a request, which has a JSON body if `body` is given. Throw an Error with the server's message.
export async function request(path, {body, method = body ? "POST" : "GET", signal} = {}) {
  const options = {method, signal, headers: {...headers(), ...(body && {"content-type": "application/json"})}};
  if (body) options.body = JSON.stringify(body);
  for (;;) {
    const response = await fetch(path, options).catch((error) => {
      throw error.name === "AbortError" ? error : new Error("The server cannot be reached.");
    });
    if (response.ok) return response;
    const message = await errorMessage(response);
    if (response.status !== 401 || !(await askKey(message))) {
      throw Object.assign(new Error(message), {status: response.status});
    }
    Object.assign(options.headers, headers());
  }
}

async function errorMessage(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server returned status ${response.status}.`;
  }
}

// Return the models, and wait until the server has loaded them. `onStage` gets a text about the load.
export async function models(onStage) {
  for (;;) {
    try {
      return (await (await request("v1/models")).json()).data;
    } catch (error) {
      if (error.status !== 503) throw error;
      const state = await (await fetch("health")).json().catch(() => ({}));
      if (state.status !== "loading") throw error;
      const share = state.total_bytes ? `, ${Math.floor(100 * state.done_bytes / state.total_bytes)}%` : "";
      onStage(`The server is ${state.stage}${share}`);
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

export async function countTokens(prompt) {
  return (await (await request("tokenize", {body: {prompt}})).json()).count;
}

// Yield the chunks of a stream, those that arrived together in one list.
export async function* stream(path, body, signal) {
  const response = await request(path, {body: {...body, stream: true}, signal});
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let incomplete = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const events = (incomplete + value).split("\n\n");
    incomplete = events.pop();
    const chunks = events.filter((event) => event !== "data: [DONE]").map((event) => JSON.parse(event.slice(6)));
    const failed = chunks.find((chunk) => chunk.error);
    yield chunks.filter((chunk) => !chunk.error);
    if (failed) throw new Error(failed.error.message);
  }
}
