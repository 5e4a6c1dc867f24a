// A scene under its cover. The own board is a grid of buttons, the rivals' boards are pictures.

import { percent } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const PATH_LENGTH = 4; // the latest moves drawn
const RECENT = 8; // the latest glimpses whose numbers stand out

export class Board {
  constructor(element, agent, { onChoose = null, label = "" } = {}) {
    Object.assign(this, { element, agent, onChoose });
    const { rows, columns, image_size: [height, width] } = agent.grid;
    this.canvas = document.createElement("canvas");
    [this.canvas.width, this.canvas.height] = [width, height];
    this.canvas.setAttribute("aria-hidden", "true");
    this.canvas.classList.toggle("coarse", Math.max(width, height) <= 160);
    this.path = document.createElementNS(SVG, "svg");
    this.path.setAttribute("viewBox", `0 0 ${columns} ${rows}`);
    this.path.setAttribute("preserveAspectRatio", "none");
    this.path.setAttribute("aria-hidden", "true");
    this.cells = document.createElement("div");
    this.cells.className = "cells";
    element.style.setProperty("--rows", rows);
    element.style.setProperty("--columns", columns);
    element.style.setProperty("--aspect", width / height);
    if (onChoose) this.#makeButtons(rows, columns, label);
    else this.#makePicture(rows, columns, label);
    element.replaceChildren(this.canvas, this.cells, this.path);
  }

  #makeButtons(rows, columns, label) {
    this.cells.setAttribute("role", "grid");
    this.cells.setAttribute("aria-label", label);
    this.buttons = [];
    for (let row = 0; row < rows; row++) {
      const line = document.createElement("div");
      line.setAttribute("role", "row");
      for (let column = 0; column < columns; column++) {
        const button = document.createElement("button");
        button.type = "button";
        button.setAttribute("role", "gridcell");
        button.tabIndex = row === 0 && column === 0 ? 0 : -1;
        button.addEventListener("click", () => this.onChoose([row, column]));
        button.addEventListener("keydown", (event) => this.#moveFocus(event, row, column));
        line.append(button);
        this.buttons.push(button);
      }
      this.cells.append(line);
    }
  }

  #makePicture(rows, columns, label) {
    this.cells.setAttribute("role", "img");
    this.label = label;
    this.buttons = Array.from({ length: rows * columns }, () => document.createElement("span"));
    this.cells.append(...this.buttons);
  }

  #moveFocus(event, row, column) {
    const { rows, columns } = this.agent.grid;
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const places = { Home: [row, 0], End: [row, columns - 1] };
    const move = moves[event.key];
    const [toRow, toColumn] = move ? [row + move[0], column + move[1]] : (places[event.key] ?? []);
    if (toRow === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    if (toRow < 0 || toRow >= rows || toColumn < 0 || toColumn >= columns) return;
    this.buttons[row * columns + column].tabIndex = -1;
    const target = this.buttons[toRow * columns + toColumn];
    target.tabIndex = 0;
    target.focus();
  }

  index([row, column]) {
    return row * this.agent.grid.columns + column;
  }

  // Shows the first `count` glimpses of a track, and where it looks next.
  show(track, count, { peek = false, done = false, sure = false } = {}) {
    const entries = track.entries.slice(0, count);
    this.#paint(track.scene, entries, peek);
    const next = done ? null : track.next(count);
    const map = count > 0 && next ? entries[count - 1].policy_map.flat() : null;
    const seen = new Map(entries.map((entry, index) => [this.index(entry.sensed), { entry, order: index + 1 }]));
    const open = map ? map.filter((value, index) => !seen.has(index)) : [];
    const [low, high] = [Math.min(...open), Math.max(...open)];
    this.element.classList.toggle("peek", peek);
    this.element.classList.toggle("done", done);
    this.element.classList.toggle("sure", sure);
    this.buttons.forEach((button, index) => {
      const mark = seen.get(index);
      button.classList.toggle("seen", Boolean(mark));
      button.classList.toggle("latest", mark?.order === count);
      button.classList.toggle("old", mark?.order <= count - RECENT);
      button.classList.toggle("overruled", Boolean(mark?.entry.overruled));
      button.classList.toggle("next", Boolean(next) && this.index(next) === index);
      const heat = map && !mark && high > low ? ((map[index] - low) / (high - low)) ** 2 : 0;
      button.style.setProperty("--heat", heat.toFixed(3));
      if (this.onChoose) this.#describe(button, index, mark, next, map);
    });
    this.#drawPath(done ? [] : entries, next);
    if (this.label) this.cells.setAttribute("aria-label", `${this.label}: ${count} glimpses uncovered`);
  }

  #describe(button, index, mark, next, map) {
    const { columns } = this.agent.grid;
    const place = `row ${Math.floor(index / columns) + 1}, column ${(index % columns) + 1}`;
    button.dataset.order = mark ? mark.order : "";
    if (mark) button.setAttribute("aria-label", `${place}, glimpse ${mark.order}`);
    else {
      const chance = map ? `, ${percent(map[index])} likely next` : "";
      const asked = next && this.index(next) === index ? ", the agent looks here next" : "";
      button.setAttribute("aria-label", `${place}, covered${chance}${asked}`);
    }
  }

  #paint(scene, entries, peek) {
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    if (peek) context.drawImage(scene.canvas, 0, 0);
    for (const entry of entries) {
      const box = scene.box(entry.sensed);
      context.drawImage(scene.canvas, ...box, ...box);
    }
  }

  // The squares uncovered so far as PNG in base64; the rest is empty.
  picture() {
    return this.canvas.toDataURL("image/png").split(",")[1];
  }

  #drawPath(entries, next) {
    const places = entries.map((entry) => entry.sensed);
    if (next) places.push(next);
    const recent = places.slice(-PATH_LENGTH - 1);
    this.path.replaceChildren();
    for (let index = 1; index < recent.length; index++) {
      const line = document.createElementNS(SVG, "line");
      const [[fromRow, fromColumn], [toRow, toColumn]] = [recent[index - 1], recent[index]];
      line.setAttribute("x1", fromColumn + 0.5);
      line.setAttribute("y1", fromRow + 0.5);
      line.setAttribute("x2", toColumn + 0.5);
      line.setAttribute("y2", toRow + 0.5);
      line.setAttribute("opacity", (index / (recent.length - 1)) ** 1.5);
      if (next && index === recent.length - 1) line.classList.add("ahead");
      this.path.append(line);
    }
  }
}
