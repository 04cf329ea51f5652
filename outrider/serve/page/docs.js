// Shows openapi.json as a page.

import {$} from "./dom.js";

const METHODS = ["get", "post", "put", "patch", "delete"];

function element(tag, text = "", properties = {}) {
  return Object.assign(document.createElement(tag), {textContent: text}, properties);
}

const nameOf = (reference) => reference.split("/").at(-1);
const isNull = (schema) => schema.type === "null";

// Return the type of a value as nodes. The name of an object is a link to its description.
function typeNodes(schema) {
  if (schema.$ref) return [element("a", nameOf(schema.$ref), {href: "#" + nameOf(schema.$ref)})];
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(" or ")];
  const choices = (schema.anyOf ?? schema.oneOf)?.filter((choice) => !isNull(choice));
  if (choices) return choices.flatMap((choice, i) => i ? [" or ", ...typeNodes(choice)] : typeNodes(choice));
  if (schema.type === "array") return ["list of ", ...typeNodes(schema.items ?? {})];
  return [(schema.type ?? "any value") + limits(schema)];
}

function limits(schema) {
  const bounds = [
    ["minimum", "at least"], ["exclusiveMinimum", "above"], ["maximum", "at most"], ["exclusiveMaximum", "below"],
    ["minLength", "characters, at least"], ["maxLength", "characters, at most"],
  ];
  const parts = bounds.filter(([key]) => key in schema).map(([key, words]) => `${words} ${schema[key]}`);
  return parts.length ? ` (${parts.join(", ")})` : "";
}

function fieldEntry(name, schema, required) {
  const entry = element("div");
  const term = element("dt");
  const kind = element("small");
  kind.append(...typeNodes(schema));
  if (required) kind.append(", required");
  else if (schema.default !== undefined && schema.default !== null) kind.append(", default " + JSON.stringify(schema.default));
  term.append(element("code", name), " ", kind);
  entry.append(term);
  if (schema.description) entry.append(element("dd", schema.description));
  return entry;
}

// Return the fields of an object. Those without effect are folded.
function fieldList(schema) {
  const list = element("dl");
  const unused = element("dl");
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    (field["x-unused"] ? unused : list).append(fieldEntry(name, field, schema.required?.includes(name)));
  }
  if (!unused.childElementCount) return [list];
  const folded = element("details");
  folded.append(element("summary", `${unused.childElementCount} fields of other servers, without effect`), unused);
  return [list, folded];
}

function routeEntry(path, method, operation, objects) {
  const entry = element("details");
  const summary = element("summary");
  summary.append(element("i", method.toUpperCase()), element("b", path), " ", element("span", operation.description ?? "", {className: "hint"}));
  entry.append(summary);
  if (operation.parameters?.length) {
    const list = element("dl");
    list.append(...operation.parameters.map(({name, schema, required, description}) => fieldEntry(name, {description, ...schema}, required)));
    entry.append(element("h3", "Parameters"), list);
  }
  for (const [type, {schema = {}}] of Object.entries(operation.requestBody?.content ?? {})) {
    const object = schema.$ref ? objects[nameOf(schema.$ref)] : schema;
    entry.append(element("h3", "Body, " + type), ...fieldList(object ?? {}));
  }
  entry.append(element("h3", "Responses"));
  const list = element("dl");
  for (const [status, {description, content = {}}] of Object.entries(operation.responses ?? {})) {
    list.append(fieldEntry(status, {type: Object.keys(content).join(" or ") || "no body", description}));
  }
  entry.append(list);
  return entry;
}

function show({info, paths, components}) {
  const objects = components?.schemas ?? {};
  $("version").textContent = info.version;
  for (const [path, operations] of Object.entries(paths)) {
    for (const method of METHODS) {
      if (operations[method]) $("routes").append(routeEntry(path, method, operations[method], objects));
    }
  }
  for (const [name, schema] of Object.entries(objects)) {
    const entry = element("details", "", {id: name});
    const summary = element("summary");
    summary.append(element("b", name), " ", element("span", schema.description ?? "", {className: "hint"}));
    entry.append(summary, ...fieldList(schema));
    $("types").append(entry);
  }
  $("types").hidden = !Object.keys(objects).length;
}

// Open the object that a link names.
function openTarget() {
  const target = location.hash && $(decodeURIComponent(location.hash.slice(1)));
  if (target) target.open = true;
}

async function load() {
  const key = $("key").value;
  const response = await fetch("openapi.json", {headers: key ? {authorization: "Bearer " + key} : {}});
  const document_ = await response.json();
  $("error").textContent = response.ok ? "" : document_.error?.message ?? "the server answered " + response.status;
  $("ask").hidden = response.status !== 401;
  if (response.ok) show(document_);
  openTarget();
}

const tryLoad = () => load().catch((error) => { $("error").textContent = "openapi.json cannot be read: " + error.message; });
$("ask").addEventListener("submit", (event) => { event.preventDefault(); tryLoad(); });
addEventListener("hashchange", openTarget);
tryLoad();
