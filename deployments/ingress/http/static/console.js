// Ties the page together: the key, the settings, the playground, the live panel.

import { getJson, key } from "./api.js";
import { Chat } from "./chat.js";
import { LivePanel } from "./live.js";

const $ = (id) => document.getElementById(id);
const WIDE = window.matchMedia("(min-width: 60rem)");
const TYPING_MS = 500;

const showState = (state, words) => {
  // What went wrong before is over: there is a valid key now, or the server answers again.
  if (state === "ready" && $("state").dataset.state !== "ready") chat.forgetProblem();
  $("state").dataset.state = state;
  if ($("state").textContent !== words) $("state").textContent = words;
};

const askForKey = () => {
  $("settings").open = true;
  $("key").focus();
};

const showModels = (models) => {
  const picker = $("model");
  const names = models.map((model) => model.id);
  if ([...picker.options].map((option) => option.value).join("\n") === names.join("\n")) return;
  const chosen = picker.value;
  picker.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(chosen)) picker.value = chosen;
  showSummary();
};

// What is set, for when the settings are folded.
const showSummary = () => {
  const said = [$("model").value, $("system").value.trim() && "system prompt"];
  for (const name of ["temperature", "top_p", "max_tokens", "seed"])
    if ($(name).value !== "") said.push(`${name.replace("_", " ")} ${$(name).value}`);
  $("summary").textContent = said.filter(Boolean).join(" · ");
};

const onStatus = (status, problem) => {
  if (status) {
    showModels(status.models);
    $("version").textContent = status.version;
    showState(status.is_ready ? "ready" : "wait", status.is_ready ? "ready" : "no worker ready");
  } else if (problem.status === 401) showState("bad", key.get() ? "the key is not valid" : "wants a key");
  else if (problem.status === 403) {
    showState("ready", "connected"); // the key is good, for the chat at least
    getJson("v1/models").then(({ data }) => showModels(data)).catch(() => {});
  } else showState("bad", "not reachable");
};

$("key").value = key.get();
const live = new LivePanel(onStatus);
const chat = new Chat({
  onProblem: (problem) => {
    if (problem.status === 401) askForKey();
  },
});
let typing = 0;
$("key").addEventListener("input", () => {
  key.set($("key").value.trim());
  clearTimeout(typing); // a half of a key would only be refused
  typing = setTimeout(() => live.wake({ withNewKey: true }), TYPING_MS);
});
$("parameters").addEventListener("submit", (event) => event.preventDefault());
$("parameters").addEventListener("input", showSummary);
$("parameters").addEventListener("change", () => chat.forgetProblem());
$("settings").open = WIDE.matches;
showSummary();
live.wake();
