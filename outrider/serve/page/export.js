// Saves a chat as a file.

import {element} from "./dom.js";
import {messagesOf, titleOf} from "./store.js";

export function exportJson(chat, model) {
  download(chat, "json", JSON.stringify({model, mode: chat.mode, messages: messagesOf(chat)}, null, 2) + "\n");
}

export function exportMarkdown(chat) {
  const parts = messagesOf(chat).map(({role, content}) => `## ${role[0].toUpperCase()}${role.slice(1)}\n\n${content.trim()}\n`);
  download(chat, "md", [`# ${titleOf(chat)}\n`, ...parts].join("\n"));
}

function download(chat, extension, text) {
  const href = URL.createObjectURL(new Blob([text]));
  const name = titleOf(chat).toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  element("a", {href, download: `${name || "chat"}.${extension}`}).click();
  setTimeout(() => URL.revokeObjectURL(href), 1000);
}
