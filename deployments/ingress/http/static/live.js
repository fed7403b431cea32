// The live panel: asks for the cluster's status every second while the tab is seen, and shows it.
// Rates are differences of totals over the last seconds, taken here: the server only reports.

import { getJson, key } from "./api.js";
import { BatchList, showJobs } from "./batches.js";
import { age, showLines } from "./lines.js";
import { drawSparkline } from "./sparkline.js";

const POLL_MS = 1000;
const RETRY_MS = 3000; // while the server does not answer
const MAX_VALUES = 60;
const WINDOW_MS = 3500; // workers announce themselves each second: one second alone would flicker

const element = (name, className, parent, text) => {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
};
const percent = (part, whole) => (whole ? Math.round((100 * part) / whole) + " %" : "–");
const rounded = (value) => (value >= 100 || value === 0 ? value.toFixed(0) : value.toFixed(1));
const setText = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

const plural = (num, one, many = one + "s") => `${num} ${num === 1 ? one : many}`;
const NOTES_OF_REFUSAL = {
  401: "Live figures need the API key.",
  403: "Live figures need an API key with the role metrics.",
};
const COUNTS = [
  "num_running", "num_waiting", "num_blocks", "num_live_blocks", "num_cached_blocks",
  "num_prefix_queried_tokens", "num_prefix_hit_tokens",
];

// A set of figures with its sparkline: of one worker, or of all.
class Card {
  constructor(parent, title, { role } = {}) {
    this.root = element("div", "card", parent);
    if (role) this.root.setAttribute("role", role);
    this.title = element("div", "title", this.root, title);
    const speed = element("div", "speed", this.root);
    this.rate = element("span", "big", speed, "0");
    element("span", "quiet", speed, " tokens/s");
    this.canvas = element("canvas", "spark", this.root);
    this.canvas.setAttribute("role", "img");
    this.bar = element("div", "bar", this.root);
    this.bar.setAttribute("role", "meter");
    this.bar.setAttribute("aria-label", "KV blocks in use");
    this.bar.setAttribute("aria-valuemin", "0");
    this.bar.setAttribute("aria-valuemax", "100");
    this.live = element("span", "held", this.bar);
    this.cached = element("span", "cached", this.bar);
    const list = element("dl", "figures", this.root);
    const figure = (name, title) => {
      const box = element("div", "", list);
      box.title = title;
      element("dt", "", box, name);
      return element("dd", "", box, "–");
    };
    this.running = figure("running", "Requests in the batch");
    this.waiting = figure("waiting", "Requests that wait for room");
    this.kv = figure("KV in use", "KV blocks that running requests hold");
    this.kept = figure("KV cached", "KV blocks that are free, and kept for prompts that begin alike");
    this.hits = figure("prefix hits", "Prompt tokens found in the prefix cache since the start");
    this.rates = [];
  }

  show(counts, rate) {
    this.rates = [...this.rates, rate].slice(-MAX_VALUES);
    setText(this.rate, rounded(rate ?? 0));
    setText(this.running, String(counts.num_running));
    setText(this.waiting, String(counts.num_waiting));
    const used = percent(counts.num_live_blocks, counts.num_blocks);
    setText(this.kv, used);
    setText(this.kept, percent(counts.num_cached_blocks, counts.num_blocks));
    setText(this.hits, percent(counts.num_prefix_hit_tokens, counts.num_prefix_queried_tokens));
    const blocks = Math.max(1, counts.num_blocks);
    this.live.style.width = (100 * counts.num_live_blocks) / blocks + "%";
    this.cached.style.width = (100 * counts.num_cached_blocks) / blocks + "%";
    this.bar.setAttribute("aria-valuenow", String(Math.round((100 * counts.num_live_blocks) / blocks)));
    const peak = Math.max(0, ...this.rates.filter((value) => value !== null));
    this.canvas.setAttribute(
      "aria-label", `Tokens per second in the last minute, at most ${rounded(peak)}`);
    this.draw();
  }

  draw() {
    drawSparkline(this.canvas, this.rates, { maxValues: MAX_VALUES });
  }

  remove() {
    this.root.remove();
  }
}

// Tokens per second from totals that are heard about once a second.
class Speedometer {
  #samples = [];

  rate(nowMs, total) {
    this.#samples.push([nowMs, total]);
    while (this.#samples.length > 2 && nowMs - this.#samples[0][0] > WINDOW_MS)
      this.#samples.shift();
    const [sinceMs, before] = this.#samples[0];
    return nowMs > sinceMs ? (1000 * (total - before)) / (nowMs - sinceMs) : null;
  }
}

export class LivePanel {
  #cards = new Map(); // by worker id: { card, speed }
  #timer = 0;
  #asking = false;
  #isLocked = false; // the key is refused: no use in asking until there is another
  #batches = new BatchList();
  #onStatus;

  // `onStatus` gets each answer of the server, and null with a Problem where there is none.
  constructor(onStatus) {
    this.#onStatus = onStatus;
    this.note = document.getElementById("live-note");
    this.total = new Card(document.getElementById("total"), "All workers");
    this.workers = document.getElementById("workers");
    this.models = document.getElementById("models");
    document.addEventListener("visibilitychange", () => this.wake());
    window.addEventListener("resize", () => this.redraw());
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  // Ask now, unless the page is hidden, the key is refused, or a request is under way.
  wake({ withNewKey = false } = {}) {
    if (withNewKey) this.#isLocked = false;
    clearTimeout(this.#timer);
    if (!document.hidden && !this.#isLocked && !this.#asking) this.#ask();
  }

  redraw() {
    this.total.draw();
    for (const { card } of this.#cards.values()) card.draw();
  }

  async #ask() {
    this.#asking = true;
    let waitMs = POLL_MS;
    const askedWith = key.get();
    try {
      const status = await getJson("v1/penstock/status");
      this.#show(status);
      this.#onStatus(status, null);
      await this.#batches.renew(status).catch(() => {}); // the old list stays
    } catch (problem) {
      const refused = NOTES_OF_REFUSAL[problem.status];
      this.#isLocked = refused !== undefined && key.get() === askedWith;
      waitMs = RETRY_MS;
      setText(this.note, this.#isLocked ? refused : problem.message);
      this.#onStatus(null, problem);
    }
    this.#asking = false;
    this.#timer = setTimeout(() => this.wake(), waitMs);
  }

  #show(status) {
    const nowMs = performance.now();
    const all = Object.fromEntries(COUNTS.map((name) => [name, 0]));
    let sum = null;
    const alive = new Set(status.workers.map((worker) => worker.id));
    for (const [id, { card }] of this.#cards)
      if (!alive.has(id)) {
        card.remove();
        this.#cards.delete(id);
      }
    for (const worker of status.workers) {
      const { card, speed } = this.#card(worker.id);
      const rate = speed.rate(nowMs, worker.num_generated_tokens);
      card.show(worker, rate);
      if (rate !== null) sum = (sum ?? 0) + rate;
      for (const name of COUNTS) all[name] += worker[name];
    }
    this.total.show(all, sum);
    const num = status.workers.length;
    setText(this.note, num ? "" : "No worker is alive.");
    setText(this.total.title, num === 1 ? "1 worker" : `${num} workers together`);
    // One worker's own card would only say the same again.
    document.getElementById("workers-title").hidden = this.workers.hidden = num < 2;
    this.#showWarnings(status.ingresses);
    this.#showNodes(status);
    this.#showScaling(status);
    showJobs(status);
    this.#showModels(status.models);
  }

  // What limits the ingresses now: each warning once, with those that have it where not all do.
  #showWarnings(ingresses) {
    const having = new Map();
    for (const { id, warnings } of ingresses)
      for (const text of warnings) having.set(text, [...(having.get(text) ?? []), id]);
    const lines = [...having].map(([text, ids]) => [
      text,
      ids.length < ingresses.length ? "ingress " + ids.join(", ") : "",
    ]);
    showLines("warnings", lines);
  }

  // What runs on each node; a single node needs no list.
  #showNodes({ nodes, workers, ingresses }) {
    const on = (replicas, node) => replicas.filter((each) => each.node === node).length;
    const lines = nodes.map(({ node, num_gpus, is_head }) => [
      node + (is_head ? " (head)" : ""),
      [
        plural(on(workers, node), "worker"),
        plural(on(ingresses, node), "ingress", "ingresses"),
        plural(num_gpus, "GPU"),
      ].join(", "),
    ]);
    showLines("nodes", lines.length > 1 ? lines : []);
  }

  // The last decision for each deployment, then the last ones that changed a number.
  #showScaling({ scaling, scale_changes }) {
    const now = scaling.map((each) => [
      `${each.deployment}: ${each.ready} ready, ${each.number} wanted ` +
        `(${each.minimum} to ${each.maximum})`,
      each.reason,
    ]);
    const before = scale_changes.slice(0, 5).map((each) => [
      `${age(each.age_s)} ago, ${each.deployment} ${each.kind} to ${each.number}`,
      each.reason,
    ]);
    showLines("scaling", [...now, ...before]);
  }

  #card(id) {
    let known = this.#cards.get(id);
    if (!known) {
      const card = new Card(this.workers, "Worker " + id, { role: "listitem" });
      known = { card, speed: new Speedometer() };
      this.#cards.set(id, known);
    }
    return known;
  }

  #showModels(models) {
    const names = models.map((model) => model.id).join("\n");
    if (names === this.models.dataset.names) return;
    this.models.dataset.names = names;
    this.models.replaceChildren();
    for (const model of models) {
      const item = element("li", "", this.models);
      element("span", "", item, model.id);
      element("span", "quiet", item, `context ${model.max_model_len.toLocaleString("en")} tokens`);
    }
  }
}
