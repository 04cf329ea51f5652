// Shows Markdown as elements: headings, lists, tables, quotes, code, emphasis and links. HTML stays text.
//
// A line is {from, to}, a range of the source, so that each piece of shown text is known by its place in the source.
// `emit(parent, from, to)` appends the text of a range; it may shade it.

import {element, patch} from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6}[ \t]+)(.*?)(?:[ \t]+#+)?[ \t]*$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const DELIMITERS = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const MARK = /\\[!-/:-@[-`{-~]|`+|\*{1,3}|_{1,3}|~~|!?\[|<?https?:\/\//g;
const LINK = /(!?\[)((?:[^[\]\\]|\\.|\[[^[\]]*\])*)\]\(\s*<?((?:https?:|mailto:)[^\s<>()]*(?:\([^\s()]*\)[^\s()]*)*)>?(?:\s+["'][^)]*)?\s*\)/y;
const URL_TEXT = /(<?)(https?:\/\/[^\s<>]*[^\s<>.,;:!?'")\]}*_])>?/y;
const MAX_DEPTH = 8;  // of quotes and lists in each other

const shown = new WeakMap();  // container: the keys of its blocks
const indentOf = (text) => text.length - text.trimStart().length;
const cut = ({from, to}, count) => ({from: Math.min(from + count, to), to});
const startsBlock = (text) => [FENCE, HEADING, QUOTE, RULE].some((kind) => kind.test(text)) || ITEM.test(text) && text.trim().length > 2;

// Show `source` in `container`. Only the blocks that differ from those shown before are changed.
// `open`: more text follows. `version`: another value shows all blocks anew.
export function renderMarkdown(container, source, {emit, open = false, version = ""}) {
  let from = 0;
  const lines = source.split("\n").map((text) => {
    const line = {from, to: from + text.length};
    from = line.to + 1;
    return line;
  });
  const blocks = new Parser(source, emit).blocks(lines, 0);
  const isOpen = (i) => open && i === blocks.length - 1;
  const before = shown.get(container) ?? [];
  const keys = blocks.map((block, i) => [version, isOpen(i), block.from, source.slice(block.from, block.to)].join("\n"));
  blocks.forEach(({make}, i) => {
    if (keys[i] === before[i]) return;
    if (container.children[i]) patch(container.children[i], make(isOpen(i)));
    else container.append(make(isOpen(i)));
  });
  while (container.children.length > blocks.length) container.lastChild.remove();
  shown.set(container, keys);
}

class Parser {
  constructor(source, emit) {
    this.text = ({from, to}) => source.slice(from, to);
    this.emit = emit;
    this.open = false;  // whether the text of the block that is made goes on
  }

  // Return the blocks of some lines: {from, to, make}. `make` returns the element of a block.
  blocks(lines, depth) {
    const blocks = [];
    for (let i = 0; i < lines.length;) {
      if (!this.text(lines[i]).trim()) {
        i++;
        continue;
      }
      const [end, makeElement] = this.blockAt(lines, i, depth);
      const make = (open = this.open) => {
        this.open = open;
        return makeElement();
      };
      blocks.push({from: lines[i].from, to: lines[end - 1].to, make});
      i = end;
    }
    return blocks;
  }

  // Return the line after the block that begins at line i, and what makes its element.
  blockAt(lines, i, depth) {
    const text = this.text(lines[i]);
    const endOf = (end, belongs) => {
      while (end < lines.length && belongs(this.text(lines[end]))) end++;
      return end;
    };
    const fence = FENCE.exec(text);
    if (fence) {
      const end = endOf(i + 1, (line) => !line.trim().startsWith(fence[1]) || line.trim().replaceAll(fence[1][0], ""));
      return [Math.min(end + 1, lines.length), () => this.code(lines.slice(i + 1, end), indentOf(text), fence[2] || "text")];
    }
    const heading = HEADING.exec(text);
    if (heading) {
      const from = lines[i].from + indentOf(text) + heading[1].length;
      return [i + 1, () => this.leaf("h" + Math.min(heading[1].trim().length + 2, 6), [{from, to: from + heading[2].length}])];
    }
    if (RULE.test(text)) return [i + 1, () => element("hr")];
    if (depth < MAX_DEPTH && QUOTE.test(text)) {
      const end = endOf(i, (line) => QUOTE.test(line));
      const inner = lines.slice(i, end).map((line) => cut(line, QUOTE.exec(this.text(line))[0].length));
      return [end, () => this.nest("blockquote", inner, depth)];
    }
    if (depth < MAX_DEPTH && ITEM.test(text)) return this.list(lines, i, depth);
    if (text.includes("|") && lines[i + 1] && DELIMITERS.test(this.text(lines[i + 1]))) {
      const end = endOf(i + 2, (line) => line.includes("|"));
      return [end, () => this.table(lines.slice(i, end))];
    }
    const end = endOf(i + 1, (line) => line.trim() && !startsBlock(line));
    return [end, () => this.leaf("p", lines.slice(i, end))];
  }

  nest(tag, lines, depth) {
    return element(tag, {}, ...this.blocks(lines, depth + 1).map(({make}) => make()));
  }

  leaf(tag, lines, properties) {
    const node = element(tag, properties);
    this.inline(node, this.run(lines));
    return node;
  }

  code(lines, indent, language) {
    const code = element("code");
    const run = this.run(lines.map((line) => cut(line, Math.min(indent, indentOf(this.text(line))))));
    this.show(code, run, 0, run.text.length);
    const head = element("figcaption", {textContent: language}, element("button", {className: "copy-code", textContent: "Copy"}));
    return element("figure", {className: "code"}, head, element("pre", {tabIndex: 0}, code));
  }

  list(lines, i, depth) {
    const [, indent, marker] = ITEM.exec(this.text(lines[i]));
    const isOrdered = (text) => /\d/.test(text);
    const items = [];
    let width = 0;  // of the marker
    let blank = false;
    for (; i < lines.length; i++) {
      const text = this.text(lines[i]);
      const own = indentOf(text);
      const inside = own >= indent.length + 2;
      const item = !inside && !RULE.test(text) && ITEM.exec(text);
      if (item && isOrdered(item[2]) === isOrdered(marker)) {
        width = item[0].length;
        items.push([cut(lines[i], width)]);
      } else if (inside || !text.trim()) items.at(-1).push(cut(lines[i], Math.min(own, width)));
      else if (!blank && !startsBlock(text)) items.at(-1).push(lines[i]);
      else break;
      blank = !text.trim();
    }
    const properties = isOrdered(marker) ? {start: Number.parseInt(marker)} : {};
    return [i, () => element(isOrdered(marker) ? "ol" : "ul", properties, ...items.map((item) => this.nest("li", item, depth)))];
  }

  table(lines) {
    const [head, delimiters, ...body] = lines.map((line) => this.cells(line));
    const sides = delimiters.map((cell) => (this.text(cell).endsWith(":") ? "right" : ""));
    const row = (tag, cells) => element("tr", {}, ...sides.map((className, i) => this.leaf(tag, cells.slice(i, i + 1), {className})));
    const table = element("table", {}, element("thead", {}, row("th", head)), element("tbody", {}, ...body.map((cells) => row("td", cells))));
    return element("div", {className: "table", tabIndex: 0}, table);
  }

  // Return the ranges of the cells of a line of a table.
  cells(line) {
    const text = this.text(line);
    const cells = [];
    for (const {0: raw, index} of text.matchAll(/(?:\\.|`[^`]*`|[^|])+|(?<=\|)(?=\|)/g)) {
      if (!raw.trim() && (index === 0 || index + raw.length === text.length)) continue;  // beside the outer bars
      const from = line.from + index + indentOf(raw);
      cells.push({from, to: from + raw.trim().length});
    }
    return cells;
  }

  // Return the text of some lines, and the place of each character in the source.
  run(lines) {
    const offsets = [];
    lines.forEach(({from, to}, i) => {
      for (let at = from; at < to || at === to && i < lines.length - 1; at++) offsets.push(at);
    });
    return {text: lines.map(this.text).join("\n"), offsets};
  }

  // Append a part of a run as it is.
  show(parent, {offsets}, from, to) {
    for (let start = from, i = from + 1; i <= to; i++) {
      if (i < to && offsets[i] === offsets[i - 1] + 1) continue;
      this.emit(parent, offsets[start], offsets[i - 1] + 1);
      start = i;
    }
  }

  // Append a part of a run with emphasis, code and links.
  inline(parent, run, from = 0, to = run.text.length) {
    const find = new RegExp(MARK);
    find.lastIndex = from;
    let done = from;
    for (let match; (match = find.exec(run.text)) && match.index < to;) {
      const span = this.spanAt(run.text, match[0], match.index, to);
      if (!span) continue;
      this.show(parent, run, done, match.index);
      const node = span.tag ? parent.appendChild(element(span.tag, span.properties)) : parent;
      if (span.nested) this.inline(node, run, span.from, span.to);
      else this.show(node, run, span.from, span.to);
      done = find.lastIndex = span.end;
    }
    this.show(parent, run, done, to);
  }

  // Return what a mark begins: {tag, from, to, end}, the range of its text and the end of the whole; null: nothing.
  spanAt(text, mark, at, to) {
    const from = at + mark.length;
    if (mark[0] === "\\") return {from: at + 1, to: from, end: from};
    if (/[[/]$/.test(mark)) return linkAt(mark.endsWith("[") ? LINK : URL_TEXT, text, at, to);
    const isCode = mark[0] === "`";
    if (!isCode && (/\s|^$/.test(text.slice(from, Math.min(from + 1, to))) || mark[0] === "_" && /\w/.test(text[at - 1] ?? ""))) return null;
    const close = isCode ? text.slice(from, to).search(`(?<!\`)${mark}(?!\`)`) : closing(text.slice(from, to), mark);
    const tag = {"`": "code", "~~": "del", "*": "em", _: "em"}[mark] ?? (isCode ? "code" : "strong");
    if (close >= 0) return {tag, nested: !isCode, from, to: from + close, end: from + close + mark.length};
    return this.open && to === text.length && from < to ? {tag, nested: !isCode, from, to, end: to} : null;  // the closing mark may follow
  }
}

function linkAt(pattern, text, at, to) {
  pattern.lastIndex = at;
  const match = pattern.exec(text);
  if (!match || at + match[0].length > to) return null;
  const [whole, mark, label, url] = match;
  const from = at + mark.length;
  const properties = {href: url ?? label, target: "_blank", rel: "noopener noreferrer"};
  return {tag: "a", properties, nested: pattern === LINK, from, to: from + label.length, end: at + whole.length};
}

// Return the place of the mark that closes an emphasis, or -1. Code spans and escapes are passed over.
function closing(text, mark) {
  for (const {0: {length, 0: first}, index} of text.matchAll(/\\.|(`+).*?\1|\*+|_+|~+/gs)) {
    if (first !== mark[0] || /\s/.test(text[index - 1]) || first === "_" && /\w/.test(text[index + length] ?? "")) continue;
    if (length === mark.length || length > mark.length && length !== 2) return index + length - mark.length;
  }
  return -1;
}
