// A line of the latest values, newest at the right.

import { svg } from "./dom.js";

const [WIDTH, HEIGHT] = [240, 44];

export class Sparkline {
  #values = [];
  #most;
  #area = svg("path", { class: "area" });
  #line = svg("path", { class: "line" });

  // `most`: how many values are kept.
  constructor(container, most) {
    this.#most = most;
    const viewBox = `0 0 ${WIDTH} ${HEIGHT}`;
    const attributes = { viewBox, preserveAspectRatio: "none", "aria-hidden": "true" };
    container.append(svg("svg", attributes, this.#area, this.#line));
  }

  add(value) {
    this.#values.push(value);
    if (this.#values.length > this.#most) this.#values.shift();
    const top = Math.max(1, ...this.#values);
    const step = WIDTH / (this.#most - 1);
    const start = WIDTH - step * (this.#values.length - 1);
    const points = this.#values.map((each, index) => {
      return `${(start + index * step).toFixed(1)} ${(HEIGHT - 2 - (HEIGHT - 6) * (each / top)).toFixed(1)}`;
    });
    this.#line.setAttribute("d", `M${points.join("L")}`);
    this.#area.setAttribute("d", `M${start.toFixed(1)} ${HEIGHT}L${points.join("L")}L${WIDTH} ${HEIGHT}Z`);
  }
}
