// Line and stacked charts as SVG, sized in pixels; a cursor by pointer or arrow keys shows values in the caption.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 24, HEIGHT = 190;

function node(parent, name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

/** Round steps (1, 2, 5 times a power of ten) that cover low to high in about `count` steps. */
function ticks(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5, 10].find(m => m * power >= raw) || 10);
  const list = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) list.push(i * step || 0);
  return { list, step };
}

/**
 * options: title, unit, format(value, step), series [{key, label, dots}], stacked (shares of a whole), zero (axis from 0)
 * draw(data): data[key] is a list of [x, y], x ascending
 */
class Chart {
  constructor(figure, options) {
    this.options = options;
    this.data = {};
    this.x = null;
    const caption = document.createElement("figcaption");
    const title = document.createElement("h2");
    title.textContent = options.title + " ";
    if (options.unit) {
      const unit = document.createElement("small");
      unit.textContent = options.unit;
      title.append(unit);
    }
    this.readout = document.createElement("div");
    this.readout.className = "readout";
    caption.append(title, this.readout);
    this.empty = document.createElement("p");
    this.empty.className = "empty";
    this.empty.textContent = "No figures yet";
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("tabindex", "0");
    figure.append(caption, this.empty, this.svg);
    this.svg.addEventListener("pointermove", event => this.point(event));
    this.svg.addEventListener("pointerleave", () => { this.x = null; this.cursor(); });
    this.svg.addEventListener("blur", () => { this.x = null; this.cursor(); });
    this.svg.addEventListener("keydown", event => this.key(event));
    new ResizeObserver(() => this.render()).observe(figure);
  }

  draw(data) {
    this.data = data;
    this.render();
  }

  points() {
    return this.options.series.flatMap(series => this.data[series.key] || []);
  }

  render() {
    const figure = this.svg.parentElement, style = getComputedStyle(figure), all = this.points();
    const width = figure.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    this.svg.replaceChildren();
    this.svg.style.display = all.length ? "" : "none";
    this.empty.hidden = all.length > 0;
    if (!all.length || width < 80) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const xs = all.map(p => p[0]), ys = all.map(p => p[1]);
    this.lowX = Math.min(...xs);
    this.highX = Math.max(...xs);
    if (this.lowX === this.highX) { this.lowX -= 1; this.highX += 1; }
    [this.low, this.high] = this.options.stacked ? [0, 1] : Chart.range(ys, this.options.zero);
    this.width = width;
    this.axes();
    if (this.options.stacked) this.stack();
    else for (const series of this.options.series) this.line(series);
    this.svg.setAttribute("aria-label", this.summary());
    this.cursorGroup = node(this.svg, "g", {});
    this.cursor();
  }

  /** Range of the axis: outliers of the first steps do not flatten the rest. */
  static range(values, zero) {
    const sorted = [...values].sort((a, b) => a - b), at = q => sorted[Math.round(q * (sorted.length - 1))];
    let low = at(0), high = at(1);
    if (sorted.length > 20) {
      const spread = at(0.95) - at(0.05);
      low = Math.max(low, at(0.02) - spread);
      high = Math.min(high, at(0.98) + spread);
    }
    if (zero) low = 0;
    const pad = (high - low || Math.abs(high) || 1) * 0.08;
    return [zero ? 0 : low - pad, high + pad];
  }

  px(x) { return LEFT + (x - this.lowX) / (this.highX - this.lowX) * (this.width - LEFT - RIGHT); }
  py(y) {
    const share = Math.min(1, Math.max(0, (y - this.low) / (this.high - this.low)));
    return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM);
  }

  axes() {
    const vertical = ticks(this.low, this.high, 4);
    for (const y of vertical.list) {
      const at = this.py(y);
      node(this.svg, "line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: at, y2: at });
      const text = this.options.format(y, vertical.step);
      node(this.svg, "text", { class: "tick", x: LEFT - 8, y: at + 4, "text-anchor": "end" }, text);
    }
    const across = ticks(this.lowX, this.highX, Math.max(4, Math.floor(this.width / 90)));
    for (const x of across.list) {
      if (!Number.isInteger(x) || this.px(x) > this.width - 24) continue;
      node(this.svg, "text", { class: "tick", x: this.px(x), y: HEIGHT - 4, "text-anchor": "middle" }, short(x));
    }
  }

  line(series) {
    const data = this.data[series.key] || [];
    if (!data.length) return;
    const path = data.map(([x, y], i) => `${i ? "L" : "M"}${this.px(x).toFixed(1)},${this.py(y).toFixed(1)}`).join("");
    if (!series.dots) {
      const [first, last, bottom] = [this.px(data[0][0]), this.px(data.at(-1)[0]), HEIGHT - BOTTOM];
      if (this.options.zero) node(this.svg, "path", { class: "area", d: `${path}L${last},${bottom}L${first},${bottom}Z` });
    }
    node(this.svg, "path", { class: `plot stroke-${series.key}`, d: path });
    if (series.dots || data.length === 1)
      for (const [x, y] of data)
        node(this.svg, "circle", { class: `fill-${series.key}`, cx: this.px(x), cy: this.py(y), r: 3.5 });
  }

  /** Areas of shares above one another; all series have the same x. */
  stack() {
    const keys = this.options.series.map(s => s.key), count = (this.data[keys[0]] || []).length;
    let below = new Array(count).fill(0);
    for (const key of keys) {
      const above = this.data[key].map(([, y], i) => below[i] + y);
      if (above.some((y, i) => y > below[i])) {
        const x = i => this.px(this.data[key][i][0]).toFixed(1);
        const up = above.map((y, i) => `${i ? "L" : "M"}${x(i)},${this.py(y).toFixed(1)}`).join("");
        const down = below.map((y, i) => `L${x(i)},${this.py(y).toFixed(1)}`).reverse().join("");
        node(this.svg, "path", { class: `stack fill-${key}`, d: `${up}${down}Z` });
      }
      below = above;
    }
  }

  // ---- cursor

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * this.width - LEFT) / (this.width - LEFT - RIGHT);
    this.x = this.lowX + share * (this.highX - this.lowX);
    this.cursor();
  }

  key(event) {
    const xs = [...new Set(this.points().map(p => p[0]))].sort((a, b) => a - b);
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -xs.length, End: xs.length }[event.key];
    if (step === undefined || !xs.length) return;
    event.preventDefault();
    const now = this.x === null ? xs.length - 1 : xs.indexOf(Chart.nearest(xs.map(x => [x]), this.x)[0]);
    this.x = xs[Math.min(xs.length - 1, Math.max(0, this.x === null ? now : now + step))];
    this.cursor();
  }

  static nearest(data, x) {
    return data.reduce((best, p) => Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best, data[0]);
  }

  /** Values at the cursor, or the newest ones. */
  cursor() {
    if (this.cursorGroup) this.cursorGroup.replaceChildren();
    const chosen = this.x !== null && this.points().length ? Chart.nearest(this.points(), this.x)[0] : null;
    if (chosen !== null && this.cursorGroup)
      node(this.cursorGroup, "line", { class: "cursor", x1: this.px(chosen), x2: this.px(chosen), y1: TOP, y2: HEIGHT - BOTTOM });
    const parts = chosen === null ? [] : [["", "step", short(chosen, true)]];
    for (const series of this.options.series) {
      const data = this.data[series.key] || [];
      if (!data.length) continue;
      const [, y] = chosen === null ? data.at(-1) : Chart.nearest(data, chosen);
      if (!this.options.stacked || data.some(p => p[1] > 0)) parts.push([series.key, series.label, this.options.format(y)]);
    }
    this.readout.replaceChildren(...parts.map(([key, label, value]) => {
      const part = document.createElement("span"), strong = document.createElement("b");
      if (key) {
        const mark = document.createElement("span");
        mark.className = `key ${key}`;
        part.append(mark);
      }
      strong.textContent = value;
      part.append(`${label} `, strong);
      return part;
    }));
  }

  summary() {
    const texts = this.options.series.map(series => {
      const data = this.data[series.key] || [];
      return data.length ? `${series.label} ${this.options.format(data.at(-1)[1])} at step ${data.at(-1)[0]}` : "";
    });
    return `${this.options.title} by step: ${texts.filter(Boolean).join(", ")}`;
  }
}
