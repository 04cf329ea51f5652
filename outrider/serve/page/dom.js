// Elements of the page. No module makes HTML of a text: every text becomes a text node.

const SVG = "http://www.w3.org/2000/svg";
const ICONS = {  // paths in a square of 24
  menu: "M4 7h16M4 12h16M4 17h16", new: "M12 5v14M5 12h14", close: "M7 7l10 10M17 7L7 17",
  settings: "M4 8h9M17 8h3M13 8a2 2 0 1 0 4 0a2 2 0 1 0-4 0M4 16h3M11 16h9M7 16a2 2 0 1 0 4 0a2 2 0 1 0-4 0",
  export: "M12 4v11M8 11l4 4 4-4M5 19h14", theme: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  attach: "M20 11.5l-8 8a5 5 0 0 1-7-7l8.5-8.5a3.3 3.3 0 0 1 4.7 4.7L10 17a1.7 1.7 0 0 1-2.4-2.4l7.6-7.6",
  send: "M12 19V5M6 11l6-6 6 6", down: "M12 5v14M6 13l6 6 6-6", left: "M14 7l-5 5 5 5", right: "M10 7l5 5-5 5", stop: "M8 8h8v8H8z",
  copy: "M9 9h11v11H9zM15 6V4H4v11h2", edit: "M4 20l1-4L16 5l3 3L8 19z", again: "M19 12a7 7 0 1 1-2-5l2 2M19 4v5h-5",
  compare: "M4 5h7v14H4zM13 5h7v14h-7z", delete: "M5 7h14M10 7V5h4v2M7 7l1 12h8l1-12", file: "M13 4H7v16h10V8zM13 4v4h4",
  drafts: "M4 8h7M14 8h2M19 8h1M4 16h12M19 16h1",
};

export const $ = (id) => document.getElementById(id);

// Return a new element. Names in `properties` that are no property of it are attributes.
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export function icon(name) {
  const image = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  image.setAttribute("viewBox", "0 0 24 24");
  image.setAttribute("aria-hidden", "true");
  path.setAttribute("d", ICONS[name]);
  image.append(path);
  return image;
}

export function iconButton(name, title, onclick) {
  return element("button", {className: "icon", title, onclick}, icon(name));
}

// Let Enter in a field do something. Shift+Enter begins a line.
export function onEnter(field, action) {
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    action();
  });
}

export function definitions(rows) {
  return rows.map(([term, text]) => (
    element("div", {}, element("dt", {textContent: term}), element("dd", {textContent: text}))));
}

// Change `old` into `fresh` where they differ, so that selection, focus and scroll position stay.
export function patch(old, fresh) {
  if (old.nodeName !== fresh.nodeName || old.className !== fresh.className) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (fresh.data.startsWith(old.data)) old.appendData(fresh.data.slice(old.length));
    else old.data = fresh.data;
    return;
  }
  for (const {name, value} of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  patchChildren(old, [...fresh.childNodes]);
}

export function patchChildren(parent, fresh) {
  while (parent.childNodes.length > fresh.length) parent.lastChild.remove();
  fresh.forEach((node, i) => {
    const old = parent.childNodes[i];
    if (old) patch(old, node);
    else parent.append(node);
  });
}

let hiding = 0;

// Say something to screen readers. A notice is shown for a moment.
export function announce(text, {notice = false} = {}) {
  $("status").textContent = text;
  $("status").classList.toggle("notice", notice);
  clearTimeout(hiding);
  if (notice) hiding = setTimeout(() => $("status").classList.remove("notice"), 4000);
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // a page that is not served over HTTPS
    const area = document.body.appendChild(element("textarea", {value: text}));
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  announce("Copied", {notice: true});
}

for (const node of document.querySelectorAll("[data-icon]")) node.prepend(icon(node.dataset.icon));
for (const node of document.querySelectorAll("[data-close]")) node.onclick = () => node.closest("dialog").close();
