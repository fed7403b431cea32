"""The page at /docs: the API read from /openapi.json, with a form to try each call.

One self-contained document that fetches nothing from anywhere else, so it works offline.
"""

from __future__ import annotations

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'"
)

DOCS_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Penstock API</title>
<style>
  :root { color-scheme: light dark; --line: #8884; --soft: #8881; --ink: #0a6; }
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 1rem }
  code, pre, textarea, input { font: 13px/1.45 ui-monospace, monospace }
  details { border: 1px solid var(--line); border-radius: 6px; margin: .6rem 0 }
  summary { padding: .5rem .8rem; cursor: pointer }
  details > div { padding: 0 .8rem .8rem }
  .method { display: inline-block; min-width: 3.2rem; font-weight: 700; color: var(--ink) }
  .note { opacity: .7 }
  table { border-collapse: collapse; width: 100% }
  td { text-align: left; vertical-align: top; border-top: 1px solid var(--line); padding: .25rem }
  textarea { width: 100%; box-sizing: border-box; min-height: 9rem }
  pre { background: var(--soft); padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere }
  button { padding: .3rem 1rem }
</style>
<h1>Penstock API</h1>
<p id="about">Loading…</p>
<p><label>API key, if this server wants one: <input id="key" type="password"></label>
  <a href="openapi.json">openapi.json</a></p>
<main id="calls"></main>
<script>
"use strict";
const element = (name, text, parent, className) => {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  if (parent) parent.append(made);
  return made;
};
const headers = () => {
  const key = document.getElementById("key").value;
  return key ? { authorization: "Bearer " + key } : {};
};
const EXAMPLES = {
  ChatCompletionRequest: { messages: [{ role: "user", content: "Tell me of a river." }],
    max_tokens: 64, stream: true },
  CompletionRequest: { prompt: "The river", max_tokens: 64, stream: true },
};
let api;
const nameOf = (schema) => schema.$ref.split("/").pop();
const resolve = (schema) => schema.$ref ? api.components.schemas[nameOf(schema)] : schema;
const typeOf = (schema) => {
  if (!schema) return "";
  if (schema.$ref) return nameOf(schema);
  if (schema.anyOf) return schema.anyOf.filter((s) => s.type !== "null").map(typeOf).join(" or ");
  if (schema.type === "array") return "list of " + typeOf(schema.items);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  return schema.type || "any";
};
const fieldTable = (schema, parent) => {
  const table = element("table", undefined, parent);
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const row = element("tr", undefined, table);
    element("code", name, element("td", undefined, row));
    const required = (schema.required || []).includes(name) ? ", required" : "";
    element("td", typeOf(field) + required, row, "note");
    element("td", field.description || "", row);
  }
};
const run = async (method, path, body, output) => {
  output.textContent = "";
  const options = { method, headers: headers() };
  if (body !== undefined) {
    options.body = body;
    options.headers["content-type"] = "application/json";
  }
  try {
    const answer = await fetch("." + path, options);
    output.textContent = "HTTP " + answer.status + "\\n\\n";
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      output.textContent += value;
    }
  } catch (error) {
    output.textContent += String(error);
  }
};
const addCall = (method, path, call) => {
  const box = element("details", undefined, document.getElementById("calls"));
  const title = element("summary", undefined, box);
  element("span", method.toUpperCase(), title, "method");
  element("code", path + " ", title);
  element("span", call.description || call.summary || "", title, "note");
  const inside = element("div", undefined, box);
  const content = call.requestBody && call.requestBody.content["application/json"];
  let input;
  if (content) {
    fieldTable(resolve(content.schema), inside);
    element("h4", "Try it", inside);
    input = element("textarea", undefined, inside);
    input.value = JSON.stringify(EXAMPLES[nameOf(content.schema)] || {}, null, 2);
  }
  const fields = (call.parameters || []).map((parameter) => {
    const label = element("label", parameter.name + " ", element("p", undefined, inside));
    return [parameter.name, element("input", undefined, label)];
  });
  const button = element("button", "Send", inside);
  const output = element("pre", "", inside);
  button.onclick = () => {
    let filled = path;
    for (const [name, field] of fields) filled = filled.replace("{" + name + "}", field.value);
    run(method.toUpperCase(), filled, input && input.value, output);
  };
};
const load = async () => {
  const answer = await fetch("openapi.json", { headers: headers() });
  const about = document.getElementById("about");
  if (!answer.ok) { about.textContent = "Cannot read openapi.json: HTTP " + answer.status; return; }
  api = await answer.json();
  about.textContent = api.info.description + " Version " + api.info.version + ".";
  document.getElementById("calls").replaceChildren();
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, call] of Object.entries(methods)) addCall(method, path, call);
};
document.getElementById("key").onchange = load;
load();
</script>
</html>
"""
