// The memory plan beside what is really used, and the KV pool.

import { call } from "./api.js";
import { badge, byId, el, outcome, say } from "./dom.js";
import { bytes, count, percent } from "./format.js";
import { subscribe } from "./state.js";

/** Parts of the plan in the order of the bar; pools come behind them, one for each layer group. */
const FIXED_PARTS = [
  ["weights", "Weights", "s4"],
  ["activations", "Activations", "s2"],
  ["attention scratch", "Attention scratch", "s3"],
  ["buffer cache", "Buffer cache", "s5"],
];

export function setUpMemory() {
  byId("clear-cache").addEventListener("click", clearCache);
  subscribe((state, changes) => {
    if (!changes.status) return;
    showMemory(state.status.memory);
    showKv(state.status);
  });
}

function plannedParts(planned) {
  const known = new Set([...FIXED_PARTS.map(([name]) => name), "unused", "budget"]);
  const fixed = FIXED_PARTS.map(([name, label, colour]) => [label, planned[name] ?? 0, colour]);
  const pools = Object.keys(planned).filter((name) => !known.has(name));
  const label = (name) => (pools.length === 1 ? "KV pool" : name);
  return [...fixed, ...pools.map((name) => [label(name), planned[name], "s1"])].filter(([, size]) => size > 0);
}

function showMemory(memory) {
  const body = byId("memory-body");
  byId("pressure").hidden = !memory || memory.pressure === "none";
  if (!memory) {
    body.replaceChildren(el("p", { class: "empty" }, "There is no plan before a worker is ready."));
    return;
  }
  badge(byId("pressure"), `short of memory: ${memory.pressure}`, "warn");
  const parts = plannedParts(memory.planned_bytes);
  const sum = parts.reduce((total, [, size]) => total + size, 0);
  const actual = memory.actual_bytes;
  const used = [
    ["Arrays", actual.arrays, "s1"],
    ["Buffer cache", actual.buffer_cache, "s5"],
  ];
  const inUse = actual.arrays + actual.buffer_cache;
  const isThere = inUse > 0; // a worker to tell
  const scale = Math.max(sum, inUse, actual.arrays_peak, 1);
  const usedText = `In use: ${bytes(inUse)} of ${bytes(sum)} planned; peak of arrays ${bytes(actual.arrays_peak)}`;
  const planText = `Planned: ${parts.map(([label, size]) => `${label} ${bytes(size)}`).join(", ")}`;
  body.replaceChildren(
    row("Planned", bar(parts, scale, planText)),
    row("In use", isThere ? bar(used, scale, usedText, actual.arrays_peak) : el("span", {}, "no worker is running")),
    el(
      "div",
      { class: "columns" },
      list([...parts, ["Planned", sum]]),
      isThere && list([...used, ["In use", inUse], ["Peak of arrays", actual.arrays_peak, ""], ["Worker process", actual.process, ""]]),
    ),
    el(
      "p",
      { class: "under" },
      `Budget ${bytes(memory.planned_bytes.budget)}, beside ${bytes(memory.headroom_bytes)} headroom for others.`,
      isThere && ` The machine has ${bytes(actual.machine_available)} available.`,
    ),
  );
}

function row(label, content) {
  return el("div", { class: "bar-row" }, el("span", {}, label), content);
}

/** `parts`: [label, size, colour]; one image to a screen reader, described by `text`. */
function bar(parts, scale, text, peak = null) {
  const pieces = parts.map(([label, size, colour]) => sized(el("i", { class: colour, title: label }), size / scale));
  if (peak !== null) {
    const mark = el("i", { class: "peak", title: "Peak" });
    mark.style.left = `${(100 * peak) / scale}%`;
    pieces.push(mark);
  }
  return el("div", { class: "bar", role: "img", "aria-label": text }, ...pieces);
}

function sized(node, share) {
  node.style.width = `${100 * share}%`;
  return node;
}

/** Entries [label, size, colour]; without a colour it is a sum, with "" a figure that is no part of the bar. */
function list(entries) {
  const cells = entries.flatMap(([label, size, colour]) => {
    const kind = colour === undefined ? "sum" : colour || null;
    const swatch = colour ? el("span", { class: "swatch" }) : null;
    return [el("dt", { class: kind }, swatch, label), el("dd", { class: kind === "sum" ? kind : null }, bytes(size))];
  });
  return el("dl", { class: "parts" }, ...cells);
}

function showKv({ kv, memory, prefix_cache: cache, engine }) {
  const body = byId("kv-body");
  const groups = memory?.kv_blocks ?? [];
  byId("clear-cache").disabled = engine.status !== "ready" || !kv.cached;
  const bars = groups.map((group) => {
    const parts = [
      ["Held by requests", group.held, "s1"],
      ["Cached prefixes", group.cached, "s2"],
      ["Free", group.free, "s0"],
    ];
    const text = parts.map(([label, blocks]) => `${label}: ${count(blocks)} blocks`).join(", ");
    return row(groups.length > 1 ? group.group : "Blocks", bar(parts, Math.max(1, group.total), text));
  });
  if (!kv.total) {
    body.replaceChildren(el("p", { class: "empty" }, "No worker is running."));
    return;
  }
  const blockBytes = groups.length === 1 ? groups[0].block_bytes : 0;
  body.replaceChildren(
    ...bars,
    el(
      "div",
      { class: "columns" },
      blocks([["Held", kv.held, "s1"], ["Cached", kv.cached, "s2"], ["Free", kv.free, "s0"], ["Blocks", kv.total]], blockBytes),
    ),
    el(
      "p",
      { class: "under" },
      cache.enabled
        ? `Prefix cache: ${count(cache.hit_tokens)} of ${count(cache.queried_tokens)} prompt tokens found` +
            (cache.queried_tokens ? ` (${percent(cache.hit_tokens / cache.queried_tokens)})` : "") +
            " since this worker started."
        : "The prefix cache is off.",
      kv.block_size ? ` A block holds ${count(kv.block_size)} tokens.` : "",
    ),
  );
}

function blocks(entries, blockBytes) {
  const cells = entries.flatMap(([label, number, colour]) => {
    const kind = colour ?? "sum";
    const size = blockBytes ? ` · ${bytes(number * blockBytes)}` : "";
    const swatch = colour ? el("span", { class: "swatch" }) : null;
    return [el("dt", { class: kind }, swatch, label), el("dd", { class: colour ? null : "sum" }, `${count(number)}${size}`)];
  });
  return el("dl", { class: "parts" }, ...cells);
}

async function clearCache() {
  const told = byId("kv-outcome");
  try {
    await call("v1/cache/prefix", { method: "DELETE" });
    outcome(told, "Cached prefixes were forgotten.");
  } catch (error) {
    outcome(told, error.message, true);
  }
  setTimeout(() => say(told, ""), 8000);
}
