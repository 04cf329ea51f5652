// The tokens of an answer by their origin: drafted and accepted, the target's own, or drafted and rejected.
//
// A piece is [text, source, rejected]: source is the name of the proposer, "" for the target's own token. rejected are
// the texts of draft tokens that the verifier rejected in its place, "" if there are none.

import {$, element} from "./dom.js";
import {settings} from "./store.js";

const COLORS = 5;
const sources = [];  // names of proposers, in the order of their colors

// Return the pieces of a round.
export function piecesOf({tokens, from_draft: fromDraft, drafts}) {
  const rejected = rejectedPaths(drafts);
  const accepted = drafts.source.filter((_, node) => drafts.accepted[node]);
  return tokens.map((token, i) => [token, fromDraft[i] ? accepted[i] : "", (rejected[i] ?? []).join(" | ")]);
}

// Return the texts of the rejected paths of a draft, by the number of accepted draft tokens before them.
function rejectedPaths({tokens, parents, accepted}) {
  const children = Map.groupBy(tokens.keys(), (node) => parents[node]);
  const pathsFrom = (node) => {
    const next = children.get(node) ?? [];
    return next.length ? next.flatMap(pathsFrom).map((path) => tokens[node] + path) : [tokens[node]];
  };
  const paths = [];
  let node = -1;  // the last token before the round
  while (node !== undefined) {  // follow the accepted path
    const next = children.get(node) ?? [];
    paths.push(next.filter((child) => !accepted[child]).flatMap(pathsFrom));
    node = next.find((child) => accepted[child]);
  }
  return paths;
}

// Return a function that appends a part of `source` to an element, and shades its tokens if drafts are shown.
// `start`: where the source begins in the output, or before it.
export function emitter(source, pieces, start = 0) {
  if (!settings.drafts || !pieces.length) return (parent, from, to) => parent.append(source.slice(from, to));
  let end = -Math.max(pieces.map(([text]) => text).join("").indexOf(source, start), 0);
  const placed = pieces.map(([text, by, rejected]) => {
    const begin = end;
    end += text.length;
    return {begin, end, by, rejected};
  });
  let i = 0;  // the piece at the place that was shown last
  return (parent, from, to) => {
    while (i > 0 && placed[i - 1].end >= from) i--;
    for (; i < placed.length && placed[i].begin < to; i++) {
      const {begin, end: pieceEnd, by, rejected} = placed[i];
      if (pieceEnd < from || pieceEnd === from && begin < from) continue;
      const missed = begin < from ? "" : rejected;  // a piece may be shown in several parts
      if (missed && settings.rejected) parent.append(element("s", {textContent: missed.replace(/\s*\n\s*/g, " ↵ "), title: "drafted and rejected", ariaHidden: "true"}));
      append(parent, source.slice(Math.max(begin, from), Math.min(pieceEnd, to)), by, missed);
    }
    append(parent, source.slice(Math.max(end, from), to), "", "");  // text that came without its tokens
  };
}

// Append the text of a token. Consecutive tokens of one source share an element.
function append(parent, text, source, rejected) {
  if (!text) return;
  const title = (source ? `drafted by ${source} and accepted` : "the target's own") + (rejected && `; rejected: ${rejected}`);
  const last = parent.lastChild;
  if (last?.title === title) last.append(text);
  else if (source) parent.append(element("mark", {textContent: text, title, className: colorOf(source)}));
  else parent.append(rejected ? element("span", {textContent: text, title}) : text);
}

function colorOf(source) {
  if (!sources.includes(source)) {
    sources.push(source);
    showLegend();
  }
  return "by" + sources.indexOf(source) % COLORS;
}

// Show what the shading means, while drafts are shown.
export function showLegend() {
  $("legend").hidden = !settings.drafts;
  const names = sources.length ? sources : ["shaded"];
  $("sources").replaceChildren(...names.map((name, i) => element("mark", {textContent: name, className: "by" + i % COLORS})));
  $("rejected").checked = settings.rejected;
}
