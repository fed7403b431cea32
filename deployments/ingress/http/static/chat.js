// The chat playground: a conversation, the answer in progress, and its speed.
// Texts enter the page as text only, never as HTML.

import { Problem, streamChat } from "./api.js";

const $ = (id) => document.getElementById(id);
const SAMPLING = ["temperature", "top_p", "max_tokens", "seed"];
const NEAR_END_PX = 60; // so close to the end the log follows the answer
const ENDINGS = { length: "ended at max tokens", abort: "ended by the server" };

// The speed of one answer, from when its pieces came.
class Stopwatch {
  constructor() {
    this.startMs = performance.now();
    this.firstMs = this.lastMs = null;
    this.numTokens = this.numFirst = 0;
  }

  saw(numTokens) {
    this.lastMs = performance.now();
    if (this.firstMs === null) {
      this.firstMs = this.lastMs;
      this.numFirst = numTokens;
    }
    this.numTokens += numTokens;
  }

  get tokensPerSecond() {
    const seconds = (this.lastMs - this.firstMs) / 1000;
    return seconds > 0 ? (this.numTokens - this.numFirst) / seconds : null;
  }
}

export class Chat {
  #turns = []; // the conversation so far: { role, content }
  #stopper = null; // of the answer that is being made

  constructor({ onProblem }) {
    this.onProblem = onProblem;
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("message").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    $("message").addEventListener("input", () => this.#fit());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    $("stop").addEventListener("click", () => this.stop());
    $("clear").addEventListener("click", () => this.clear());
  }

  get isBusy() {
    return this.#stopper !== null;
  }

  stop() {
    this.#stopper?.abort();
  }

  clear() {
    this.stop();
    this.#turns = [];
    for (const turn of $("log").querySelectorAll(".turn")) turn.remove();
    $("empty").hidden = false;
    this.#showProblem(null);
    this.#showFigures(null);
    $("message").focus();
  }

  // What was wrong is mended, or may be: the words about it would mislead.
  forgetProblem() {
    this.#showProblem(null);
  }

  async send() {
    const text = $("message").value;
    if (this.isBusy || !text.trim() || !this.#settingsAreValid()) return;
    this.#showProblem(null);
    $("message").value = "";
    this.#fit();
    const asked = this.#addTurn("user", text);
    const bubble = this.#addTurn("assistant", "");
    const turns = [...this.#turns, { role: "user", content: text }];
    const { said, problem, wasStopped, stopwatch } = await this.#answer(turns, bubble);
    bubble.classList.remove("busy");
    if (!asked.isConnected) return; // cleared meanwhile
    if (said || (!problem && !wasStopped)) {
      this.#turns = [...turns, { role: "assistant", content: said }];
      if (wasStopped) this.#addNote(bubble, "stopped");
      else if (!said) this.#addNote(bubble, "an empty answer");
    } else {
      // Nothing came: the message goes back to where it can be sent again.
      asked.remove();
      bubble.remove();
      if (!$("message").value) $("message").value = text;
      this.#fit();
    }
    $("empty").hidden = $("log").querySelector(".turn") !== null;
    if (stopwatch.firstMs !== null) this.#showFigures(stopwatch);
    if (problem) this.#showProblem(problem);
  }

  // Stream the answer to `turns` into `bubble`.
  async #answer(turns, bubble) {
    const stopper = (this.#stopper = new AbortController());
    const stopwatch = new Stopwatch();
    const system = $("system").value.trim();
    const body = {
      messages: system ? [{ role: "system", content: system }, ...turns] : turns,
      stream_options: { include_usage: true },
      return_token_ids: true, // exact counts, also of an answer that was stopped
      ...this.#sampling(),
    };
    const outcome = { said: "", problem: null, wasStopped: false, stopwatch };
    this.#setBusy(true);
    try {
      for await (const chunk of streamChat(body, stopper.signal)) {
        const [choice] = chunk.choices;
        if (chunk.usage) stopwatch.usage = chunk.usage;
        if (!choice) continue;
        if (choice.token_ids?.length) stopwatch.saw(choice.token_ids.length);
        if (choice.delta.content) {
          outcome.said += choice.delta.content;
          this.#append(bubble, choice.delta.content);
          this.#showFigures(stopwatch);
        }
        if (ENDINGS[choice.finish_reason]) this.#addNote(bubble, ENDINGS[choice.finish_reason]);
      }
    } catch (error) {
      outcome.wasStopped = stopper.signal.aborted;
      if (!outcome.wasStopped)
        outcome.problem = error instanceof Problem ? error : new Problem(String(error));
    }
    this.#stopper = null;
    this.#setBusy(false);
    return outcome;
  }

  #sampling() {
    const chosen = {};
    if ($("model").value) chosen.model = $("model").value;
    for (const name of SAMPLING) if ($(name).value !== "") chosen[name] = Number($(name).value);
    return chosen;
  }

  #settingsAreValid() {
    if ($("parameters").checkValidity()) return true;
    $("settings").open = true;
    return $("parameters").reportValidity();
  }

  #addTurn(role, text) {
    $("empty").hidden = true;
    const turn = document.createElement("div");
    turn.className = "turn " + role;
    const who = document.createElement("span");
    who.className = "who";
    who.textContent = role === "user" ? "You" : $("model").value || "Model";
    const content = document.createElement("div");
    content.className = "text";
    content.textContent = text;
    turn.append(who, content);
    if (role === "assistant") turn.classList.add("busy");
    $("log").append(turn);
    $("log").scrollTop = $("log").scrollHeight;
    return turn;
  }

  #append(bubble, text) {
    const log = $("log");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX;
    bubble.querySelector(".text").append(text);
    if (follows) log.scrollTop = log.scrollHeight;
  }

  #addNote(bubble, text) {
    const note = document.createElement("span");
    note.className = "note";
    note.textContent = text;
    bubble.append(note);
  }

  #setBusy(isBusy) {
    $("log").setAttribute("aria-busy", String(isBusy)); // read aloud when it is whole
    const hadFocus = document.activeElement === $(isBusy ? "send" : "stop");
    $("stop").hidden = !isBusy;
    $("send").hidden = isBusy;
    if (hadFocus) (isBusy ? $("stop") : $("message")).focus();
  }

  #showProblem(problem) {
    const box = $("problem");
    box.replaceChildren();
    box.hidden = problem === null;
    if (problem === null) return;
    const words = document.createElement("strong");
    words.textContent = problem.message;
    box.append(words);
    if (problem.said) {
      const said = document.createElement("span");
      said.textContent = "The server says: " + problem.said;
      box.append(said);
    }
    this.onProblem(problem);
  }

  #showFigures(stopwatch) {
    const speed = stopwatch?.tokensPerSecond ?? null;
    $("rate").textContent = speed === null ? "–" : speed.toFixed(1);
    const firstMs = stopwatch ? stopwatch.firstMs - stopwatch.startMs : null;
    $("first").textContent = firstMs === null ? "–" : `${Math.max(1, Math.round(firstMs))} ms`;
    $("length").textContent = stopwatch ? `${stopwatch.numTokens} tokens` : "–";
    const usage = stopwatch?.usage;
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    $("prompt").textContent = usage
      ? `${usage.prompt_tokens} tokens${cached ? `, ${cached} cached` : ""}`
      : "–";
  }

  // As high as its text, within the limits of the style sheet.
  #fit() {
    const box = $("message");
    box.style.height = "auto";
    box.style.height = box.scrollHeight + 2 + "px";
  }
}
