// Requests in flight, each with its way out. Rows stay the same elements, so focus stays where it is.

import { call } from "./api.js";
import { badge, byId, el, outcome, say } from "./dom.js";
import { age, count } from "./format.js";
import { subscribe } from "./state.js";

const TONES = { waiting: "warn", prefill: "", decode: "good" };

const rows = new Map(); // request id -> Row

const cell = (props, ...children) => el("td", { role: "cell", ...props }, ...children);

class Row {
  constructor(request) {
    this.id = request.id;
    this.where = el("small");
    this.phase = el("span", { class: "badge" });
    this.prompt = el("span");
    this.cached = el("small");
    this.output = el("span");
    this.most = el("small");
    this.age = cell({ class: "number", "data-label": "age" });
    this.button = el("button", { type: "button", "aria-label": `Cancel ${request.id}`, click: () => this.cancel() }, "Cancel");
    this.element = el(
      "tr",
      { role: "row" },
      cell({}, el("span", { class: "id", title: request.id }, request.id), this.where),
      cell({}, this.phase),
      cell({ class: "number", "data-label": "prompt" }, this.prompt, this.cached),
      cell({ class: "number", "data-label": "output" }, this.output, this.most),
      this.age,
      cell({}, this.button),
    );
  }

  show(request) {
    const several = request.sequences > 1 ? ` · ${count(request.sequences)} sequences` : "";
    say(this.where, `${request.route || "request"} · ${request.model}${several}`);
    badge(this.phase, request.phase, TONES[request.phase]);
    say(this.prompt, count(request.prompt_tokens));
    say(this.cached, request.cached_tokens ? `${count(request.cached_tokens)} cached` : "");
    say(this.output, count(request.output_tokens));
    say(this.most, `≤ ${count(request.max_output_tokens)}`);
    say(this.age, age(request.age_s));
  }

  async cancel() {
    this.button.disabled = true;
    try {
      await call(`v1/requests/${encodeURIComponent(this.id)}/cancel`, { method: "POST" });
      outcome(byId("requests-outcome"), `${this.id} was cancelled.`);
    } catch (error) {
      outcome(byId("requests-outcome"), `${this.id} was not cancelled: ${error.message}`, true);
      this.button.disabled = false;
    }
  }
}

export function setUpRequests() {
  subscribe((state, changes) => {
    if (changes.requests) show(changes.requests, state.status);
  });
}

function show({ requests, total, own_only: ownOnly }, status) {
  const present = new Set(requests.map((request) => request.id));
  for (const [id, row] of rows) {
    if (!present.has(id)) {
      row.element.remove();
      rows.delete(id);
    }
  }
  for (const request of requests) {
    if (!rows.has(request.id)) {
      const row = new Row(request);
      rows.set(request.id, row);
      byId("request-rows").append(row.element);
    }
    rows.get(request.id).show(request);
  }
  byId("requests-empty").hidden = total > 0;
  say(byId("requests-empty"), ownOnly ? "Nothing of this key is in flight." : "Nothing is in flight.");
  say(byId("requests-note"), note(requests.length, total, ownOnly ? Math.max(0, (status?.in_flight ?? 0) - total) : 0));
}

function note(shown, total, others) {
  const parts = [];
  if (total) parts.push(total > shown ? `the oldest ${count(shown)} of ${count(total)}` : count(total));
  if (others) parts.push(`${count(others)} of other keys not shown`);
  return parts.join(" · ");
}
