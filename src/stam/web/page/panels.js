// The probabilities as moving bars, and confidence over time as lines.

import { percent, readable } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const MOST_BARS = 10;

export class Bars {
  constructor(list, labels) {
    this.list = list;
    this.labels = labels;
    this.rows = new Map();
    this.fixed = labels.length <= MOST_BARS; // few labels keep their order, of many the best are shown
    list.classList.toggle("wide", labels.some((label) => label.length > 3));
    list.style.setProperty("--bars", Math.min(labels.length, MOST_BARS));
  }

  show(probabilities, threshold) {
    this.list.style.setProperty("--threshold", threshold);
    const ranked = this.labels.map((label, index) => index);
    if (!this.fixed && probabilities) ranked.sort((a, b) => probabilities[b] - probabilities[a]);
    const shown = ranked.slice(0, MOST_BARS);
    const best = probabilities ? probabilities.indexOf(Math.max(...probabilities)) : -1;
    for (const [index, row] of this.rows) {
      if (!shown.includes(index)) {
        row.remove();
        this.rows.delete(index);
      }
    }
    shown.forEach((index, place) => {
      const row = this.rows.get(index) ?? this.#makeRow(index);
      const value = probabilities ? probabilities[index] : 0;
      row.style.setProperty("--place", place);
      row.style.setProperty("--value", value);
      row.classList.toggle("best", index === best);
      row.classList.toggle("sure", index === best && value > threshold);
      row.lastElementChild.textContent = probabilities ? percent(value) : "";
    });
  }

  #makeRow(index) {
    const row = document.createElement("li");
    const name = document.createElement("span");
    name.className = "bar-name";
    name.textContent = readable(this.labels[index]);
    name.title = name.textContent;
    const bar = document.createElement("span");
    bar.className = "bar";
    const value = document.createElement("span");
    value.className = "bar-value";
    row.append(name, bar, value);
    this.list.append(row);
    this.rows.set(index, row);
    return row;
  }
}

function node(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

export class Chart {
  constructor(svg, total) {
    Object.assign(this, { svg, total });
  }

  // Drawn in the pixels it has, so that its words keep their size.
  #fit() {
    const { width, height } = this.svg.getBoundingClientRect();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.box = { left: 40, right: width - 10, top: 8, bottom: height - 38 };
  }

  x(count, most) {
    const { left, right } = this.box;
    return left + ((right - left) * (count - 1)) / Math.max(1, most - 1);
  }

  y(value) {
    const { top, bottom } = this.box;
    return bottom - (bottom - top) * value;
  }

  // lines: [{ name, series, values, stopped }]
  show(lines, threshold) {
    this.#fit();
    const { left, right, bottom } = this.box;
    const longest = Math.max(...lines.map((line) => line.values.length));
    const most = Math.min(this.total, Math.max(10, Math.ceil(longest / 10) * 10));
    this.svg.replaceChildren();
    for (const value of [0, 0.5, 1]) {
      this.svg.append(
        node("line", { class: "rule", x1: left, x2: right, y1: this.y(value), y2: this.y(value) }),
        node("text", { class: "tick end", x: left - 6, y: this.y(value) + 4 }, percent(value)),
      );
    }
    for (const count of [1, Math.round(most / 2), most]) {
      this.svg.append(node("text", { class: "tick middle", x: this.x(count, most), y: bottom + 17 }, count));
    }
    this.svg.append(
      node("text", { class: "tick middle", x: (left + right) / 2, y: bottom + 32 }, "glimpses"),
      node("line", { class: "limit", x1: left, x2: right, y1: this.y(threshold), y2: this.y(threshold) }),
    );
    for (const { series, values, stopped } of [...lines].reverse()) {
      if (values.length === 0) continue;
      const points = values.map((value, index) => `${this.x(index + 1, most).toFixed(1)},${this.y(value).toFixed(1)}`);
      const last = values.length - 1;
      this.svg.append(
        node("polyline", { class: `line ${series}`, points: points.join(" ") }),
        node("circle", {
          class: `dot ${series} ${stopped ? "stopped" : ""}`,
          cx: this.x(last + 1, most),
          cy: this.y(values[last]),
          r: stopped ? 5 : 3.5,
        }),
      );
    }
    const words = lines.map(({ name, values }) =>
      values.length ? `${name} ${percent(values[values.length - 1])} after ${values.length}` : `${name} not started`,
    );
    this.svg.setAttribute("aria-label", `Confidence: ${words.join("; ")}`);
  }
}
