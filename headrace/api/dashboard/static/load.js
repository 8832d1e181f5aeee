// The charts: tokens per second, latencies, requests, cache.

import { LineChart } from "./charts.js";
import { byId } from "./dom.js";
import { count, percent, rate, seconds } from "./format.js";
import { subscribe } from "./state.js";

const SHARES = ["p50", "p90", "p99"];

const percentiles = (name) => SHARES.map((share, index) => ({ name: share, value: (point) => point[name]?.[index] ?? null }));

/** Text and unit apart: "12.3 ms" -> ["12.3", "ms"]. */
const split = (text) => text.split(" ");

/** On a scale of durations: without digits that say nothing. */
const tick = (value) => (value < 1 ? `${Number((value * 1000).toPrecision(2))} ms` : `${Number(value.toPrecision(2))} s`);

const CHARTS = [
  {
    title: "Output tokens",
    series: [{ name: "all requests", value: (point) => point.generation_tps }],
    format: rate,
    least: 10,
    headline: (point) => [rate(point?.generation_tps), "tok/s"],
  },
  {
    title: "Prompt tokens",
    series: [{ name: "all requests", value: (point) => point.prompt_tps }],
    format: rate,
    least: 10,
    headline: (point) => [rate(point?.prompt_tps), "tok/s"],
  },
  {
    title: "Requests",
    series: [
      { name: "running", value: (point) => point.running },
      { name: "queued", value: (point) => point.waiting },
    ],
    format: (value) => (value === null || Number.isInteger(value) ? count(value) : value.toFixed(1)),
    least: 2,
    headline: (point) => [count(point && point.running + point.waiting), ""],
  },
  {
    title: "Time to first token",
    series: percentiles("ttft_s"),
    format: seconds,
    least: 0.01,
    tick,
    headline: (point) => split(seconds(point?.ttft_s?.[0])),
  },
  {
    title: "Time between tokens",
    series: percentiles("itl_s"),
    format: seconds,
    least: 0.001,
    tick,
    headline: (point) => split(seconds(point?.itl_s?.[0])),
  },
  {
    title: "Prefix cache hits, KV held",
    series: [
      { name: "hits", value: (point) => point.hit_rate },
      { name: "held", value: (point) => point.kv_held },
    ],
    format: percent,
    max: 1,
    headline: (point) => split(percent(point?.hit_rate)),
  },
];

export function setUpLoad() {
  const charts = CHARTS.map((options) => new LineChart(options));
  byId("charts").append(...charts.map((chart) => chart.figure));
  subscribe((state, changes) => {
    if (changes.points) for (const chart of charts) chart.draw(state.points);
  });
}
