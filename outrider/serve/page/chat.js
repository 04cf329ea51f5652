// The page: the list of chats, and the requests of the chat that is shown.

import {models, stream} from "./api.js";
import {isEmpty, setContext, setMessage, startComposer, takeMessage} from "./composer.js";
import {$, announce, copy, element, iconButton} from "./dom.js";
import {exportJson, exportMarkdown} from "./export.js";
import {countArrival, countRound, figuresOf, startRun} from "./figures.js";
import {comparedFields, samplingFields, showSettings, startSettings} from "./settings.js";
import {piecesOf, showLegend} from "./shading.js";
import {chats, messagesOf, newChat, remove, save, saveSettings, settings, shownAnswer, textOf, titleOf, touch} from "./store.js";
import {showTurns, updateTurn} from "./turns.js";
import {offerVideos} from "./videos.js";

const MODES = {  // what the model takes: what the page says about it, and examples
  chat: ["Your chats stay in this browser.", "Lena has 5 boxes with 12 pencils each. She gives away 17 pencils. How many are left?",
    "Write a Python function that checks whether a word is a palindrome.", "Explain speculative decoding in three sentences."],
  prompt: ["This chat uses no chat template: the model continues a text. All turns together are the text.",
    "def fibonacci(n):", "Once upon a time", "The capital of France is"],
  source: ["This model has an encoder. It answers each text by itself.", "translate English to German: The house is wonderful."],
  audio: ["This model transcribes audio. Send a recording to /v1/audio/transcriptions."],
};
const SCROLL_SLACK = 60;  // pixels from the end within which the page follows an answer

let model = null;  // the text model, as /v1/models describes it
let chat = newChat("chat");
let running = null;  // {controller, chat, turn} of the answer that is generated
let follows = true;  // whether the page scrolls with the answer

const actions = {
  generate,
  // Ask again with another text. What follows the message is dropped.
  edit(turn, text) {
    if (running) return;
    chat.turns.splice(chat.turns.indexOf(turn) + 1);
    turn.text = text;
    answerLast();
  },
  show(turn, index) {
    turn.shown = index;
    save(chat);
    refresh();
  },
};

// Return the request for the answer after some turns: its path and its body.
function requestAfter(turns) {
  const {enable_thinking: thinking, ...fields} = samplingFields();
  if (chat.mode === "chat") return ["v1/chat/completions", {messages: messagesOf(chat, turns), enable_thinking: thinking, ...fields}];
  const text = chat.mode === "source" ? {source: textOf(turns.at(-1))} : {prompt: turns.map(textOf).join("")};
  return ["v1/completions", {...text, ...fields}];
}

function answerLast() {
  const turn = {role: "assistant", answers: [], shown: 0};
  chat.turns.push(turn);
  generate(turn);
}

// Generate an answer to the turns before `turn`, and with `compare` a second one without drafts.
async function generate(turn, compare = settings.compare) {
  if (running) return;
  const mine = chat;
  const [path, body] = requestAfter(chat.turns.slice(0, chat.turns.indexOf(turn)));
  const answer = newAnswer(body);
  turn.shown = turn.answers.push(answer) - 1;
  const {coupled, drafted, plain} = compare ? comparedFields(model, body) : {};
  if (compare) Object.assign(answer, {plain: newAnswer(body), coupled});
  running = {controller: new AbortController(), chat, turn};
  touch(chat);
  showList();
  refresh();
  scrollToEnd();
  announce("Generating");
  const update = () => {
    updateTurn(mine, turn, actions, running?.turn === turn);
    if (follows && mine === chat) scrollToEnd();
  };
  await run(answer, path, {...body, ...drafted}, update);
  if (compare && !answer.error && answer.finish !== "stopped") await run(answer.plain, path, {...body, ...plain}, update);
  else delete answer.plain;
  running = null;
  save(mine);
  update();
  showState();
  announce(answer.error || (answer.finish === "stopped" ? "Stopped" : "Done"));
}

const newAnswer = ({temperature}) => (
  {id: Math.random(), text: "", reasoning: "", pieces: [], figures: null, finish: "", error: "", temperature});

// Fill an answer from a stream. An error becomes part of the answer.
async function run(answer, path, body, update) {
  const measured = startRun();
  const request = {...body, stream_options: {include_drafts: true, include_usage: true}};
  let usage = null;
  let frame = 0;
  const show = () => {
    frame = 0;
    if (measured.arrivals.length) answer.figures = figuresOf(measured, usage);
    update();
  };
  try {
    for await (const chunks of stream(path, request, running.controller.signal)) {
      const before = measured.tokens;
      for (const chunk of chunks) {
        usage = chunk.usage ?? usage;
        if (chunk.choices.length) addChoice(answer, measured, chunk.choices[0]);
      }
      if (measured.tokens > before) countArrival(measured, measured.tokens - before);
      frame ||= requestAnimationFrame(show);
    }
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else answer.error = error.message;
  }
  answer.finish ||= "stop";
  cancelAnimationFrame(frame);
  show();
}

// Add the choice of a chunk to an answer, and measure its round.
function addChoice(answer, measured, {text, delta, finish_reason: finish, speculation}) {
  answer.text += text ?? delta.content ?? "";
  answer.reasoning += delta?.reasoning_content ?? "";
  answer.finish = finish ?? "";
  if (!speculation.tokens.length) return;
  answer.pieces.push(...piecesOf(speculation));
  countRound(measured, speculation);
}

// Whether the field can be sent. An empty message lets a model go on with its text.
const canSend = () => model && model.input !== "audio" && (!isEmpty() || chat.mode === "prompt" && chat.turns.length > 0);

function send() {
  if (running || !canSend()) return;
  chat.turns.push(takeMessage());
  answerLast();
}

function stop() {
  if (!running) return;
  running.controller.abort();
  $("message").focus();
}

// Show a chat of the list, or a new one.
function open(next = newChat(model?.input ?? "chat")) {
  chat = next;
  document.body.classList.remove("menu");
  showList();
  showMode();
  refresh();
  scrollToEnd();
  $("message").focus();
}

function refresh() {
  showTurns(chat, actions, running?.turn);
  showState();
}

function showList() {
  $("chats").replaceChildren(...chats.map((each) => {
    const title = titleOf(each);
    const name = element("button", {className: "name", textContent: title, title, onclick: () => open(each)});
    if (each === chat) name.ariaCurrent = "page";
    return element("li", {}, name, iconButton("delete", `Delete ${title}`, () => {
      if (!confirm(`Delete the chat “${title}”?`)) return;
      if (running?.chat === each) stop();
      remove(each);
      if (each === chat) open();
      else showList();
    }));
  }));
}

// Show what the model takes, with examples.
function showMode() {
  if (model && model.input !== "chat") chat.mode = model.input;
  const [about, ...examples] = MODES[chat.mode];
  $("about").textContent = $("banner").textContent = about;
  $("banner").hidden = chat.mode === "chat";
  $("message").placeholder = chat.mode === "chat" ? "Ask something" : "Write the beginning of a text";
  $("examples").replaceChildren(...examples.map((textContent) => element("button", {textContent, onclick: () => setMessage(textContent)})));
  if (model) {
    $("greeting").textContent = `${chat.mode === "chat" ? "Chat" : "Write"} with ${model.id}`;
    showSettings(chat, model);
  }
  showState();
}

// Show what can be done now, and how much of the context is used.
function showState() {
  document.body.classList.toggle("empty", !chat.turns.length);
  $("send").hidden = running;
  $("stop").hidden = !running;
  $("send").disabled = !canSend();
  $("export").disabled = !chat.turns.length;
  const used = chat.turns.findLast((turn) => turn.answers && shownAnswer(turn)?.figures?.usage);
  if (model) setContext(model.max_model_len, used ? shownAnswer(used).figures.usage.total_tokens : 0);
}

function scrollToEnd() {
  follows = true;
  $("log").scrollTop = $("log").scrollHeight;
}

// Let a button of the toolbar turn a setting on and off.
function addSwitch(name, onchange) {
  const show = () => $(name).setAttribute("aria-pressed", settings[name]);
  $(name).onclick = () => {
    settings[name] = !settings[name];
    saveSettings();
    show();
    onchange?.();
  };
  show();
}

function reshade() {
  showLegend();
  for (const turn of chat.turns) if (turn.answers) updateTurn(chat, turn, actions, running?.turn === turn);
}

async function start() {
  $("error").textContent = "";
  try {
    const all = await models((stage) => { $("model").textContent = stage; });
    model = all.find((each) => !each.video);
    const {id, verifier, proposers} = model;
    offerVideos(all.find((each) => each.video));
    $("model").textContent = id;
    $("exact").textContent = verifier.exact ? "exact" : "not exact";
    $("exact").title = `verifier ${verifier.name}, proposers ${proposers.join(", ") || "none"}`;
  } catch (error) {
    $("model").textContent = "";
    $("error").textContent = error.message;
  }
  $("retry").hidden = model;
  open(chat.turns.length ? chat : undefined);
}

const CLICKS = {
  send, stop, retry: start, "to-end": scrollToEnd, "new-chat": () => open(),
  menu: () => document.body.classList.toggle("menu"), shade: () => document.body.classList.remove("menu"),
  "export-json": () => exportJson(chat, model?.id), "export-markdown": () => exportMarkdown(chat),
};
for (const [id, action] of Object.entries(CLICKS)) $(id).onclick = action;
startComposer(send);
startSettings(() => chat, showMode);
addSwitch("drafts", reshade);
addSwitch("compare");
$("rejected").onchange = () => {
  settings.rejected = $("rejected").checked;
  saveSettings();
  reshade();
};
$("message").addEventListener("input", showState);
$("log").onscroll = () => {
  const {scrollHeight, scrollTop, clientHeight} = $("log");
  follows = scrollHeight - scrollTop - clientHeight < SCROLL_SLACK;
  $("to-end").hidden = follows;
};
$("log").onclick = ({target}) => {
  if (!target.classList.contains("copy-code")) return;
  const code = target.closest("figure").querySelector("code").cloneNode(true);
  for (const rejected of code.querySelectorAll("s")) rejected.remove();
  copy(code.textContent);
};
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (document.body.classList.contains("menu")) document.body.classList.remove("menu");
  else stop();
});
addEventListener("pagehide", () => running && save(running.chat));
showLegend();
start();
