// The dialog of settings, and what a request has of them.

import {$, element} from "./dom.js";
import {save, saveSettings, settings} from "./store.js";

// Return the fields of a request that the settings set.
export function samplingFields() {
  const {temperature, max_tokens, top_p, top_k, seed, proposer, k, thinking} = settings;
  const fields = {temperature: temperature ?? 1, max_tokens: max_tokens ?? -1};
  for (const [name, value] of Object.entries({top_p, top_k, seed, k})) if (value !== null) fields[name] = value;
  if (proposer) fields.proposer = proposer;
  if (thinking) fields.enable_thinking = thinking === "on";
  return fields;
}

// Return the fields that let two runs of a request be compared: neither reuses what the other has learned or cached.
// At a temperature above 0, an equal seed gives equal texts under the rule coupled.
export function comparedFields({verifier, verifiers}, {temperature, seed}) {
  const coupled = temperature > 0 && verifier.exact && verifiers.includes("coupled");
  const shared = coupled ? {verifier: "coupled", seed: seed ?? Math.floor(Math.random() * 2 ** 31)} : {};
  const user = () => "page-" + Math.random().toString(36).slice(2);
  return {coupled, drafted: {...shared, user: user()}, plain: {...shared, user: user(), k: 0, proposer: undefined}};
}

const ofChat = (name) => name === "mode" || name === "system";

// Show the settings in their fields, and those of the chat.
export function showSettings(chat, model) {
  const {proposers, enable_thinking: thinks, input} = model;
  const names = proposers.length > 1 ? proposers : [];
  if (!names.includes(settings.proposer)) settings.proposer = "";
  if (!thinks) settings.thinking = "";
  $("proposer").lastElementChild.replaceChildren(element("option", {value: "", textContent: "chosen in each round"}),
    ...names.map((name) => element("option", {textContent: name})));
  $("proposer").hidden = !names.length;
  $("thinking").hidden = !thinks;
  $("mode").hidden = input !== "chat";
  $("system").hidden = chat.mode !== "chat";
  for (const field of $("settings").querySelectorAll("[name]")) field.value = (ofChat(field.name) ? chat : settings)[field.name] ?? "";
}

// `chatNow` returns the chat that is shown. `onChange` is called after a change.
export function startSettings(chatNow, onChange) {
  $("settings").onchange = ({target}) => {
    if (!target.checkValidity()) return;
    const value = target.type !== "number" ? target.value : target.value === "" ? null : Number(target.value);
    if (ofChat(target.name)) chatNow()[target.name] = value;
    if (target.name !== "mode") settings[target.name] = value;
    saveSettings();
    save(chatNow());
    onChange();
  };
  $("open-settings").onclick = () => $("settings").showModal();
  $("settings").onclick = (event) => {  // beside the dialog
    if (event.target === $("settings")) $("settings").close();
  };
}
