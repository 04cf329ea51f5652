// What the browser keeps: the settings and the chats.
//
// A chat is {id, changed, mode, system, turns}. A turn of the user is {role, text, files}, one of the assistant is
// {role, answers, shown}: regenerating adds an answer. `shown` is the index of the one that the chat goes on with.

import {announce} from "./dom.js";

const PREFIX = `outrider:${location.pathname}:`;  // servers behind paths of one address do not share chats
const CHAT = PREFIX + "chat:";

export const settings = {
  temperature: 0, top_p: null, top_k: null, max_tokens: 1024, seed: null, proposer: "", k: null, thinking: "",
  system: "", drafts: false, rejected: false, compare: false, ...read(PREFIX + "settings"),
};
export const chats = Object.keys(localStorage).filter((key) => key.startsWith(CHAT)).map(read).filter(Boolean)
  .sort((a, b) => b.changed - a.changed);

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export const saveSettings = () => write(PREFIX + "settings", settings);

// Keep a chat of the list. If the storage is full, forget the tokens of older answers first.
export function save(chat) {
  if (!chats.includes(chat) || write(CHAT + chat.id, chat)) return;
  for (const other of [...chats].reverse()) {
    for (const answer of other.turns.flatMap((turn) => turn.answers ?? [])) answer.pieces = [];
    write(CHAT + other.id, other);
    if (write(CHAT + chat.id, chat)) return;
  }
  announce("The storage of the browser is full. Delete a chat to keep this one.", {notice: true});
}

export function newChat(mode) {
  return {id: Date.now().toString(36) + Math.random().toString(36).slice(2, 6), mode, system: settings.system, turns: []};
}

export function remove(chat) {
  const place = chats.indexOf(chat);
  if (place >= 0) chats.splice(place, 1);
  localStorage.removeItem(CHAT + chat.id);
}

// Put a chat at the top of the list.
export function touch(chat) {
  remove(chat);
  chat.changed = Date.now();
  chats.unshift(chat);
}

export function titleOf({turns: [first]}) {
  const title = first?.text.trim().split("\n")[0] || first?.files[0]?.name || "New chat";
  return title.length > 60 ? title.slice(0, 59) + "…" : title;
}

// Return the answer of a turn that is shown.
export const shownAnswer = (turn) => turn.answers[turn.shown];

// Return the text of a turn for the model. Files of the user stand between fences after the message.
export function textOf(turn) {
  if (turn.answers) return shownAnswer(turn).text;
  const parts = turn.files.map(({name, content}) => {
    const longest = Math.max(2, ...(content.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${content}${content.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [turn.text, ...parts].filter(Boolean).join("\n\n");
}

// Return the messages of a chat, as a request has them.
export function messagesOf({system, turns}, before = turns) {
  const messages = before.map((turn) => ({role: turn.role, content: textOf(turn)})).filter(({content}) => content);
  return [...(system.trim() ? [{role: "system", content: system}] : []), ...messages];
}
