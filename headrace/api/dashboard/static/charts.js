// Line charts in SVG: a few series over the last minutes, with gaps where nothing is known.
//
// Elements are made once and their attributes changed with each point. The pointer over a chart shows the values at
// that time in the legend.

import { el, say, svg } from "./dom.js";
import { HISTORY_S } from "./state.js";

const HEIGHT = 92;
const LEFT = 46;
const RIGHT = 4;
const TOP = 8;
const BOTTOM = 16;
const GAP_S = 3.5;

/** The next round number, so that scales change seldom. */
export function niceMax(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].find((step) => step * unit >= value * 0.999) * unit;
}

export class LineChart {
  /**
   * @param options `title`; `series`: [{name, value: point => number|null}]; `format` of a value; `tick` of the scale,
   *   if that differs; `headline`: point => [text, unit]; `max`: of the scale, when it is fixed; `least`: the smallest.
   */
  constructor(options) {
    this.options = options;
    this.points = [];
    this.hovered = null;
    this.now = el("span", { class: "now" });
    this.grid = [0, 1, 2].map(() => [svg("line", { class: "grid" }), svg("text", { "text-anchor": "end", dy: "0.32em" })]);
    this.times = [svg("text", {}), svg("text", { "text-anchor": "end" })];
    this.lines = options.series.map((_, index) => svg("path", { class: `line s${index + 1}` }));
    this.area = svg("path", { class: "area s1" });
    this.cross = svg("line", { class: "cross", visibility: "hidden" });
    this.svg = svg("svg", { role: "img" }, ...this.grid.flat(), ...this.times, this.area, ...this.lines, this.cross);
    this.values = options.series.map(() => el("b"));
    const legend = options.series.map((series, index) =>
      el("li", { class: `s${index + 1}` }, el("span", { class: "swatch" }), `${series.name} `, this.values[index]),
    );
    this.when = el("li");
    this.legend = el("ul", { class: "legend" }, ...(legend.length > 1 ? legend : []), this.when);
    this.figure = el(
      "figure",
      { class: "chart" },
      el("figcaption", {}, el("span", { class: "name" }, options.title), this.now),
      this.svg,
      this.legend,
    );
    this.svg.addEventListener("pointermove", (event) => this.hover(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.hover(null));
    new ResizeObserver(() => this.draw(this.points)).observe(this.figure);
  }

  draw(points) {
    this.points = points;
    this.width = Math.max(120, this.svg.clientWidth || 0);
    this.end = points.length ? points[points.length - 1].at : 0;
    const values = points.flatMap((point) => this.options.series.map((series) => series.value(point) ?? 0));
    this.max = this.options.max ?? niceMax(Math.max(this.options.least ?? 0, ...values));
    this.drawScale();
    this.options.series.forEach((series, index) => this.lines[index].setAttribute("d", this.path(series)));
    if (this.options.series.length === 1) this.area.setAttribute("d", this.path(this.options.series[0], true));
    this.drawValues();
  }

  drawScale() {
    this.grid.forEach(([line, label], index) => {
      const value = (this.max * index) / 2;
      const y = this.y(value);
      set(line, { x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y });
      set(label, { x: LEFT - 6, y });
      say(label, (this.options.tick ?? this.options.format)(value));
    });
    set(this.times[0], { x: LEFT, y: HEIGHT - 2 });
    set(this.times[1], { x: this.width - RIGHT, y: HEIGHT - 2 });
    say(this.times[0], `−${HISTORY_S / 60} min`);
    say(this.times[1], "now");
  }

  drawValues() {
    const at = this.hovered === null ? this.points.length - 1 : this.hovered;
    const point = this.points[at];
    const texts = this.options.series.map((series) => this.options.format(point ? series.value(point) : null));
    texts.forEach((text, index) => say(this.values[index], text));
    say(this.when, this.hovered === null || !point ? "" : `at ${new Date(point.at * 1000).toLocaleTimeString()}`);
    const [text, unit] = this.options.headline(point ?? null);
    this.now.replaceChildren(text, ...(unit ? [el("small", {}, unit)] : []));
    const told = this.options.series.map((series, index) => `${series.name} ${texts[index]}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.options.title}, the last ${HISTORY_S / 60} minutes. Now: ${told}.`);
    const x = this.hovered !== null && point ? this.x(point.at) : 0;
    set(this.cross, { x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM, visibility: x ? "visible" : "hidden" });
  }

  hover(offset) {
    this.hovered = null;
    if (offset !== null && this.points.length) {
      const distances = this.points.map((point) => Math.abs(this.x(point.at) - offset));
      this.hovered = distances.indexOf(Math.min(...distances));
    }
    this.drawValues();
  }

  /** Runs of known values; with `isArea` each is closed down to the base. */
  path(series, isArea = false) {
    const runs = [[]];
    let last = null;
    for (const point of this.points) {
      const value = series.value(point);
      if (value === null || (last !== null && point.at - last > GAP_S)) runs.push([]);
      last = point.at;
      if (value !== null) runs[runs.length - 1].push([this.x(point.at), this.y(value)]);
    }
    const base = this.y(0);
    return runs
      .filter((run) => run.length)
      .map((run) => {
        const steps = run.length > 1 ? run : [run[0], [run[0][0] + 0.01, run[0][1]]];
        const line = "M" + steps.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
        return isArea ? `${line}L${steps[steps.length - 1][0].toFixed(1)} ${base}L${steps[0][0].toFixed(1)} ${base}Z` : line;
      })
      .join("");
  }

  x(at) {
    return LEFT + (1 - (this.end - at) / HISTORY_S) * (this.width - LEFT - RIGHT);
  }

  y(value) {
    return TOP + (1 - Math.min(value, this.max) / this.max) * (HEIGHT - TOP - BOTTOM);
  }
}

function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
}
