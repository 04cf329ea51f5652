// Shows Markdown as elements: headings, lists, tables, quotes, code, emphasis and links. HTML stays text.
//
// A line is {from, to}, a range of the source, so that each piece of shown text is known by its place in the source.
// `emit(parent, from, to)` appends the text of a range; it may shade it.

import {element, patch, patchChildren} from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*?)(?:[ \t]+#+)?[ \t]*$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const DELIMITERS = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const SPECIAL = /\\[!-/:-@[-`{-~]|`+|\*{1,3}|_{1,3}|~~|!?\[|<?https?:\/\//g;
const LINK = /!?\[((?:[^[\]\\]|\\.|\[[^[\]]*\])*)\]\(\s*<?((?:https?:|mailto:)[^\s<>()]*(?:\([^\s()]*\)[^\s()]*)*)>?(?:\s+["'][^)]*)?\s*\)/y;
const URL_TEXT = /<?(https?:\/\/[^\s<>]*[^\s<>.,;:!?'")\]}*_])>?/y;
const MAX_DEPTH = 8;  // of quotes and lists in each other

const shown = new WeakMap();  // container: the keys of its blocks
const indentOf = (text) => text.length - text.trimStart().length;
const startsBlock = (text) => [FENCE, HEADING, QUOTE, RULE].some((kind) => kind.test(text)) || ITEM.test(text) && text.trim().length > 2;

// Show `source` in `container`. Only the blocks that differ from those shown before are changed.
// `open`: more text follows. `version`: another value shows all blocks anew.
export function renderMarkdown(container, source, {emit, open = false, version = ""}) {
  const lines = [...source.matchAll(/[^\n]*(?:\n|$)/g)].map(({index, 0: text}) => ({from: index, to: index + text.length - text.endsWith("\n")}));
  const blocks = new Parser(source, emit).blocks(lines, 0);
  const before = shown.get(container) ?? [];
  const keys = blocks.map(({from, to}, i) => [version, open && i === blocks.length - 1, from, source.slice(from, to)].join("\n"));
  blocks.forEach(({make}, i) => {
    if (keys[i] === before[i]) return;
    const fresh = make(open && i === blocks.length - 1);
    if (container.children[i]) patch(container.children[i], fresh);
    else container.append(fresh);
  });
  while (container.children.length > blocks.length) container.lastChild.remove();
  shown.set(container, keys);
}

// Show text without Markdown.
export function renderPlain(container, source, {emit}) {
  const fresh = element("p");
  emit(fresh, 0, source.length);
  patchChildren(container, [fresh]);
  shown.delete(container);
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
      const [end, make] = this.blockAt(lines, i, depth);
      const makeOpen = (open = this.open) => {
        this.open = open;
        return make();
      };
      blocks.push({from: lines[i].from, to: lines[end - 1].to, make: makeOpen});
      i = end;
    }
    return blocks;
  }

  // Return the line after the block that begins at line i, and what makes its element.
  blockAt(lines, i, depth) {
    const text = this.text(lines[i]);
    const endOf = (start, belongs) => {
      let end = start;
      while (end < lines.length && belongs(this.text(lines[end]))) end++;
      return end;
    };
    const fence = FENCE.exec(text);
    if (fence) {
      const close = new RegExp(`^ {0,3}\\${fence[1][0]}{${fence[1].length},}[ \\t]*$`);
      const end = endOf(i + 1, (line) => !close.test(line));
      return [Math.min(end + 1, lines.length), () => this.code(lines.slice(i + 1, end), indentOf(text), fence[2] || "text")];
    }
    const heading = HEADING.exec(text);
    if (heading) {
      const from = lines[i].from + text.indexOf(heading[2], indentOf(text) + heading[1].length);
      return [i + 1, () => this.leaf("h" + Math.min(heading[1].length + 2, 6), [{from, to: from + heading[2].length}])];
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

  leaf(tag, lines) {
    const node = element(tag);
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

  list(lines, first, depth) {
    const [, indent, marker] = ITEM.exec(this.text(lines[first]));
    const ordered = /\d/.test(marker);
    const inside = indent.length + 2;  // columns from which a line belongs to an item
    const itemAt = (line) => {
      const match = ITEM.exec(line);
      return match && match[1].length < inside && /\d/.test(match[2]) === ordered && !RULE.test(line) ? match[0].length : 0;
    };
    const items = [];
    let width = 0;  // of the marker
    let blank = false;
    let i = first;
    for (; i < lines.length; i++) {
      const text = this.text(lines[i]);
      const own = indentOf(text);
      if (itemAt(text)) {
        width = itemAt(text);
        items.push([cut(lines[i], width)]);
      } else if (!text.trim() || own >= inside) {
        items.at(-1).push(cut(lines[i], Math.min(own, width)));
      } else if (!blank && !startsBlock(text)) {
        items.at(-1).push(lines[i]);
      } else break;
      blank = !text.trim();
    }
    const make = () => element(ordered ? "ol" : "ul", ordered ? {start: Number.parseInt(marker)} : {},
      ...items.map((item) => this.nest("li", item, depth)));
    return [i, make];
  }

  table(lines) {
    const [head, delimiters, ...body] = lines.map((line) => this.cells(line));
    const sides = delimiters.map((cell) => {
      const text = this.text(cell);
      return text.endsWith(":") ? (text.startsWith(":") ? "center" : "right") : "";
    });
    const row = (tag, cells) => element("tr", {}, ...sides.map((className, i) => {
      const cell = this.leaf(tag, cells[i] ? [cells[i]] : []);
      cell.className = className;
      return cell;
    }));
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
    const find = new RegExp(SPECIAL);
    find.lastIndex = from;
    let done = from;
    for (let match; (match = find.exec(run.text)) && match.index < to;) {
      const span = this.spanAt(run, match[0], match.index, to);
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
  spanAt({text}, mark, at, to) {
    const from = at + mark.length;
    if (mark[0] === "\\") return {from: at + 1, to: from, end: from};
    if (mark.endsWith("[")) return linkAt(LINK, text, at, to);
    if (mark.endsWith("/")) return linkAt(URL_TEXT, text, at, to);
    const goesOn = this.open && to === text.length && from < to;  // the closing mark may follow
    if (mark[0] === "`") {
      const close = new RegExp(`(?<!\`)${mark}(?!\`)`).exec(text.slice(from, to));
      if (!close) return goesOn ? {tag: "code", from, to, end: to} : null;
      return {tag: "code", from, to: from + close.index, end: from + close.index + mark.length};
    }
    if (from >= to || /\s/.test(text[from]) || mark[0] === "_" && /\w/.test(text[at - 1])) return null;
    const close = closing(text, mark, from, to);
    const tag = mark === "~~" ? "del" : mark.length === 1 ? "em" : "strong";
    if (close < 0) return goesOn ? {tag, nested: true, from, to, end: to} : null;
    return {tag, nested: true, from, to: close, end: close + mark.length};
  }
}

const cut = ({from, to}, count) => ({from: Math.min(from + count, to), to});

function linkAt(pattern, text, at, to) {
  pattern.lastIndex = at;
  const match = pattern.exec(text);
  const end = at + (match?.[0].length ?? 0);
  if (!match || end > to) return null;
  const from = at + match[0].indexOf(match[1], pattern === LINK ? match[0].indexOf("[") + 1 : 0);
  const properties = {href: match[2] ?? match[1], target: "_blank", rel: "noopener noreferrer"};
  return {tag: "a", properties, nested: pattern === LINK, from, to: from + match[1].length, end};
}

// Return the place of the mark that closes an emphasis, or -1. Code spans and escapes are passed over.
function closing(text, mark, start, to) {
  for (const {0: found, index} of text.slice(start, to).matchAll(/\\.|(`+).*?\1|\*+|_+|~+/gs)) {
    const at = start + index;
    const {length} = found;
    if (found[0] !== mark[0] || /\s/.test(text[at - 1]) || mark[0] === "_" && /\w/.test(text[at + length])) continue;
    if (length === mark.length || length > mark.length && length !== 2) return at + length - mark.length;
  }
  return -1;
}
