// The models and their engines; the worker's life.

import { call } from "./api.js";
import { badge, byId, el, outcome, say } from "./dom.js";
import { bytes, count, percent } from "./format.js";
import { subscribe } from "./state.js";

export const TONES = { ready: "good", starting: "warn", restarting: "warn", silent: "warn", draining: "warn", failed: "bad" };
/** States in which a worker is there. */
const STEPPING = ["ready", "silent", "draining"];
const MAX_EVENTS = 8;

let reloading = false;
const items = new Map(); // first name -> elements of a list item

export function setUpModels() {
  subscribe((state, changes) => {
    if (!changes.status) return;
    for (const model of state.status.models) showModel(model);
    showWorker(state.status.engine);
    noteEvents(state.status.engine);
  });
}

function showModel(model) {
  const name = model.names[0];
  if (!items.has(name)) items.set(name, newItem(model));
  const { state, about, button } = items.get(name);
  badge(state, reloading && model.can_reload ? "reloading" : model.status, reloading && model.can_reload ? "warn" : TONES[model.status]);
  say(about, [...model.names.slice(1).map((alias) => `also ${alias}`), ...facts(model)].join(" · "));
  if (button) button.disabled = reloading || model.status !== "ready";
}

function newItem(model) {
  const name = model.names[0];
  const state = el("span", { class: "badge" });
  const about = el("span", { class: "note" });
  const button = model.can_reload
    ? el("button", { type: "button", "aria-label": `Reload ${name}`, click: () => askToReload(name) }, "Reload")
    : null;
  byId("model-list").append(el("li", {}, el("strong", {}, name), state, about, button));
  return { state, about, button };
}

function facts(model) {
  const found = [model.role];
  if (model.loading && model.status !== "ready") found.push(`${model.loading.stage} ${percent(model.loading.fraction)}`);
  if (model.max_model_len) found.push(`${count(model.max_model_len)} tokens of context`);
  if (model.process_bytes) found.push(`process ${bytes(model.process_bytes)}`);
  if (model.message) found.push(model.message);
  return found;
}

function askToReload(name) {
  say(byId("confirm-title"), `Reload ${name}?`);
  say(
    byId("confirm-text"),
    "The configuration is read anew and another worker takes the place of the present one. Requests in flight go on in the new one.",
  );
  say(byId("confirm-yes"), "Reload");
  const dialog = byId("confirm-dialog");
  byId("confirm-no").onclick = () => dialog.close();
  byId("confirm-yes").onclick = () => {
    dialog.close();
    reload(name);
  };
  dialog.showModal();
}

async function reload(name) {
  const told = byId("models-outcome");
  reloading = true;
  outcome(told, `${name} is being reloaded…`);
  try {
    await call("v1/models/reload", { method: "POST" });
    outcome(told, `${name} was reloaded.`);
  } catch (error) {
    outcome(told, error.message, true);
  }
  reloading = false;
}

function showWorker(engine) {
  const facts = [
    ["Process", engine.pid !== null && STEPPING.includes(engine.status) ? `pid ${engine.pid}` : "none"],
    ["Restarts", count(engine.restarts)],
    ["Reloads", count(engine.reloads)],
    ["Preemptions", count(engine.preemptions)],
    ["Steps", count(engine.steps)],
    ["Device", engine.device ?? "not known yet", "wide"],
    ["Attention", engine.attention ?? "not known yet", "wide"],
  ];
  if (engine.quarantined) facts.push(["Replayed alone, as suspects of a death", count(engine.quarantined), "wide"]);
  if (engine.detail) facts.push(["Last words", engine.detail, "wide"]);
  const list = byId("worker-facts");
  if (list.children.length !== facts.length) {
    list.replaceChildren(...facts.map(([label, , wide]) => el("div", { class: wide ?? null }, el("dt", {}, label), el("dd"))));
  }
  facts.forEach(([, text], index) => say(list.children[index].lastChild, text));
}

let seen = null;

/** Changes of the engine's state that this page saw, newest first. */
function noteEvents(engine) {
  const before = seen;
  seen = engine;
  if (!before) return;
  if (engine.restarts > before.restarts) addEvent(`worker died${engine.message ? `: ${engine.message}` : ""}`, "bad");
  if (engine.reloads > before.reloads) addEvent("worker replaced by a reload", "");
  if (engine.status !== before.status) addEvent(engine.status, TONES[engine.status]);
}

function addEvent(text, tone) {
  const mark = el("span");
  badge(mark, text, tone);
  const list = byId("worker-events");
  list.prepend(el("li", {}, el("time", {}, new Date().toLocaleTimeString()), mark));
  while (list.children.length > MAX_EVENTS) list.lastChild.remove();
}
