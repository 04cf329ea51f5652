// Shows the turns of a chat.

import {$, copy, element, iconButton, onEnter, patchChildren} from "./dom.js";
import {figuresElement, speedText} from "./figures.js";
import {renderMarkdown} from "./markdown.js";
import {emitter} from "./shading.js";
import {settings, shownAnswer} from "./store.js";

const NOTES = {length: "The answer reached its limit of tokens.", stopped: "Stopped."};
const articles = new WeakMap();  // turn: its element

// Show all turns. `actions` are what the buttons of a turn do. `running` is the turn that is generated.
export function showTurns(chat, actions, running) {
  $("turns").replaceChildren(...chat.turns.map((turn) => {
    const article = turn.answers ? assistantArticle() : userArticle(turn, actions);
    articles.set(turn, article);
    return article;
  }));
  for (const turn of chat.turns) if (turn.answers) updateTurn(chat, turn, actions, running === turn);
}

const heading = (textContent) => element("h2", {className: "hidden", textContent});

function userArticle(turn, actions) {
  const files = turn.files.map(({name, content}) => (
    element("details", {className: "file"}, element("summary", {textContent: name}), element("pre", {textContent: content, tabIndex: 0}))));
  const tools = element("div", {className: "tools"},
    iconButton("copy", "Copy message", () => copy(turn.text)), iconButton("edit", "Edit message", () => editTurn(turn, actions)));
  const bubble = element("div", {className: "bubble"}, ...(turn.text ? [element("p", {textContent: turn.text})] : []), ...files);
  return element("article", {className: "user"}, heading("You"), bubble, tools);
}

// Replace a message by a field.
function editTurn(turn, actions) {
  const area = element("textarea", {value: turn.text, rows: 3, ariaLabel: "Message"});
  const close = () => {
    const fresh = userArticle(turn, actions);
    articles.get(turn).replaceWith(fresh);
    articles.set(turn, fresh);
    fresh.querySelector(".tools").lastChild.focus();
  };
  const send = () => (area.value.trim() || turn.files.length) && actions.edit(turn, area.value);
  onEnter(area, send);
  area.addEventListener("keydown", ({key}) => key === "Escape" && close());
  const row = element("div", {className: "row"}, element("button", {textContent: "Cancel", onclick: close}),
    element("button", {className: "primary", textContent: "Send", onclick: send}));
  articles.get(turn).replaceChildren(heading("You"), element("div", {className: "bubble editing"}, area, row));
  area.focus();
}

const part = (className, tag = "div") => element(tag, {className});
const assistantArticle = () => element("article", {}, heading("Answer"), part("sides"), part("verdict", "p"), part("tools"));

// Show what has changed in a turn of the assistant.
export function updateTurn(chat, turn, actions, running) {
  const article = articles.get(turn);
  if (!article?.isConnected) return;
  const [, sides, verdict, tools] = article.children;
  const answer = shownAnswer(turn);
  const shown = answer.plain ? [[answer, "With drafts"], [answer.plain, "Plain decoding"]] : [[answer, ""]];
  article.ariaBusy = String(running);
  article.classList.toggle("both", Boolean(answer.plain));
  while (sides.children.length > shown.length) sides.lastChild.remove();
  shown.forEach(([side, title], i) => {
    if (!sides.children[i]) sides.append(sideElement());
    updateSide(sides.children[i], side, {title, chat, running: running && !side.finish});
  });
  showVerdict(verdict, running ? {} : answer);
  tools.replaceChildren(...(running ? [] : buttons(turn, answer, actions)));
}

function sideElement() {
  const reasoning = element("details", {className: "reasoning"}, element("summary", {textContent: "Reasoning"}), part("text"));
  return element("section", {}, part("", "h3"), reasoning, part("text"), part("note", "p"), part(""));
}

function updateSide(section, answer, {title, chat, running}) {
  const {text, reasoning, figures, error, pieces} = answer;
  const [head, thought, body, note, measured] = section.children;
  const version = `${settings.drafts},${settings.rejected},${answer.id}`;
  head.textContent = title;
  if (title && figures) head.append(element("b", {textContent: speedText(figures.speed)}));
  thought.hidden = !reasoning;
  renderMarkdown(thought.lastChild, reasoning, {emit: emitter(reasoning, pieces), open: running, version});
  const emit = emitter(text, pieces, reasoning.length);
  const isChat = chat.mode === "chat";
  body.className = isChat ? "text" : "text raw";
  if (isChat) renderMarkdown(body, text, {emit, open: running, version});
  else {
    const raw = element("p");
    emit(raw, 0, text.length);
    patchChildren(body, [raw]);
  }
  section.classList.toggle("waiting", running && !text && !reasoning);
  note.textContent = error || NOTES[answer.finish] || "";
  note.className = error ? "note error" : "note";
  note.role = error ? "alert" : "note";
  patchChildren(measured, figures ? [figuresElement(figures)] : []);
}

function buttons(turn, answer, actions) {
  const {answers, shown} = turn;
  const show = (name, title, index) => {
    const button = iconButton(name, title, () => actions.show(turn, index));
    button.disabled = !answers[index];
    return button;
  };
  const versions = [show("left", "Earlier answer", shown - 1), `${shown + 1} / ${answers.length}`, show("right", "Later answer", shown + 1)];
  return [
    iconButton("copy", "Copy answer", () => copy(answer.text)), iconButton("again", "Regenerate", () => actions.generate(turn)),
    iconButton("compare", "Compare with plain decoding", () => actions.generate(turn, true)), ...(answers.length > 1 ? versions : []),
  ];
}

// Say what two runs of one request show: the speeds, and whether the texts are equal.
function showVerdict(verdict, {text, reasoning, figures, plain, temperature, coupled}) {
  verdict.replaceChildren();
  if (!plain?.figures) return;
  const equal = text === plain.text && reasoning === plain.reasoning;
  let words = "Both texts are equal.";
  if (!equal && !figures.usage?.speculation.exact) words = "The texts differ: the verification rule of this server is not exact.";
  else if (!equal && temperature && !coupled) words = `The texts differ: at temperature ${temperature} they are two samples of one distribution.`;
  else if (!equal) words = "The texts differ: rounding decides between near-equal tokens. outrider audit counts how often.";
  verdict.classList.toggle("equal", equal);
  verdict.append(element("b", {textContent: `${(figures.speed / plain.figures.speed).toFixed(2)}× the speed of plain decoding. `}), words);
}
