// The field for a message, and the text files that go with it.

import {countTokens} from "./api.js";
import {$, announce, element, iconButton, onEnter} from "./dom.js";

const MAX_BYTES_PER_TOKEN = 16;  // of the context: a larger file is not read
let files = [];  // {name, content, tokens}
let context = Infinity;  // tokens of the model
let free = Infinity;  // tokens of the context that the chat leaves

const count = (tokens) => `${tokens.toLocaleString("en")} tokens`;

export function setContext(tokens, used) {
  context = tokens;
  free = tokens - used;
  $("context").textContent = `${used.toLocaleString("en")} of ${count(tokens)}`;
}

export const isEmpty = () => !$("message").value.trim() && !files.length;

// Put a text into the field.
export function setMessage(text) {
  $("message").value = text;
  $("message").dispatchEvent(new Event("input"));
  $("message").focus();
}

// Return the turn of the message and its files, and clear the field.
export function takeMessage() {
  const turn = {role: "user", text: $("message").value.trimEnd(), files: files.map(({name, content}) => ({name, content}))};
  files = [];
  setMessage("");
  showFiles();
  return turn;
}

// Attach files, each if it is a text that fits into the context.
async function attach(list) {
  $("error").textContent = "";
  for (const file of list) {
    try {
      if (file.size > MAX_BYTES_PER_TOKEN * context) throw new Error(`is too large for a context of ${count(context)}. Attach a part of it.`);
      const content = await readText(file);
      const tokens = await countTokens(content);
      if (tokens > free) throw new Error(`has ${count(tokens)}, and ${count(free)} are free. Attach a part of it.`);
      files.push({name: file.name, content, tokens});
      announce(`${file.name} attached, ${count(tokens)}`);
    } catch (error) {
      $("error").textContent = `${file.name} ${error.message}`;
    }
  }
  showFiles();
}

async function readText(file) {
  const bytes = await file.arrayBuffer();
  try {
    const text = new TextDecoder("utf-8", {fatal: true}).decode(bytes);
    if (!text.includes("\0")) return text;
  } catch {}  // the same error as for a NUL
  throw new Error("is not a text in UTF-8. Attach a text file.");
}

function showFiles() {
  $("files").replaceChildren(...files.map((file) => {
    const remove = iconButton("close", `Remove ${file.name}`, () => {
      files = files.filter((other) => other !== file);
      showFiles();
    });
    return element("li", {}, element("span", {textContent: file.name}), element("small", {textContent: count(file.tokens)}), remove);
  }));
  setMessage($("message").value);
}

// Let the field take keys, and the page take files. `send` sends the message.
export function startComposer(send) {
  const field = $("message");
  field.addEventListener("input", () => {
    field.style.height = "auto";
    field.style.height = `${Math.min(field.scrollHeight, innerHeight * .4)}px`;
  });
  onEnter(field, send);
  $("attach").onclick = () => $("file-input").click();
  $("file-input").onchange = () => {
    attach([...$("file-input").files]);
    $("file-input").value = "";
  };
  const dropping = (on) => document.body.classList.toggle("dropping", on);
  const take = (event, list) => {
    if (!list.length) return;
    event.preventDefault();
    attach([...list]);
  };
  field.addEventListener("paste", (event) => take(event, event.clipboardData.files));
  addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    dropping(true);
  });
  addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) dropping(false);
  });
  addEventListener("drop", (event) => {
    dropping(false);
    take(event, event.dataTransfer.files);
  });
}
