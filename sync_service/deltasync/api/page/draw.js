// Charts: a line over time, a distribution, and the phases of a cut.

import { make } from "./dom.js";
import { clock, seconds, UNKNOWN } from "./text.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 100;
export const PARTS = ["gather", "send", "seal", "log", "apply", "release", "ack"];

function shape(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

export class LineChart {
  constructor(title, text) {
    this.title = title;
    this.text = text;
    this.svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.path = this.svg.appendChild(shape("path", {}));
    this.caption = make("figcaption");
    this.scale = make("div", { class: "scale" }, make("span"), make("span"));
    this.element = make("figure", {}, this.caption, this.svg, this.scale);
  }

  draw(times, values) {
    const known = values.filter((value) => value !== null);
    if (known.length === 0) {
      this.path.setAttribute("d", "");
      this.label(`${this.title}: unknown`);
      return;
    }
    const now = values.at(-1) === null ? "unknown now" : `${this.text(values.at(-1))} now`;
    const most = Math.max(...known) || 1;
    const first = times[0];
    const span = times.at(-1) - first || 1;
    let pen = "M";
    const path = values.map((value, at) => {
      if (value === null) {
        pen = "M";
        return "";
      }
      const x = (WIDTH * (times[at] - first)) / span;
      const y = HEIGHT - 4 - ((HEIGHT - 8) * value) / most;
      const step = `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
      const alone = pen === "M" && (values[at + 1] ?? null) === null;
      pen = "L";
      if (alone) return `${step}h1`;
      return step;
    });
    this.path.setAttribute("d", path.join(""));
    this.scale.firstChild.textContent = clock(first);
    this.scale.lastChild.textContent = clock(times.at(-1));
    this.label(`${this.title}: ${now}, at most ${this.text(Math.max(...known))}`);
  }

  label(text) {
    this.caption.textContent = text;
    this.svg.setAttribute("aria-label", text);
  }
}

export class Distribution {
  constructor(title) {
    this.title = title;
    this.svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.caption = make("figcaption");
    this.scale = make("div", { class: "scale" }, make("span"), make("span"));
    this.element = make("figure", {}, this.caption, this.svg, this.scale);
  }

  draw(bounds, counts) {
    const most = Math.max(...counts, 1);
    const width = WIDTH / counts.length;
    const bars = counts.map((each, at) => {
      const height = (each / most) * (HEIGHT - 4);
      return shape("rect", { x: at * width + 1, y: HEIGHT - height, width: width - 2, height });
    });
    this.svg.replaceChildren(...bars);
    const total = counts.reduce((sum, each) => sum + each, 0);
    const text = total ? `${this.title}: ${total} deliveries, half within ${this.within(bounds, counts, total / 2)}` : `${this.title}: not measured yet`;
    this.caption.textContent = text;
    this.svg.setAttribute("aria-label", text);
    this.scale.firstChild.textContent = `up to ${seconds(bounds[0])}`;
    this.scale.lastChild.textContent = `over ${seconds(bounds.at(-1))}`;
  }

  within(bounds, counts, target) {
    let seen = 0;
    for (const [at, each] of counts.entries()) {
      seen += each;
      if (seen >= target) return at < bounds.length ? seconds(bounds[at]) : `more than ${seconds(bounds.at(-1))}`;
    }
    return "";
  }
}

// The phases of a cut as a bar, scaled so that `longest` fills the cell.
export function fillBar(cell, parts, longest) {
  const bar = cell.firstElementChild ?? cell.appendChild(make("div", { class: "bar", role: "img" }, ...PARTS.map((name) => make("span", { class: name }))));
  const label = PARTS.filter((name) => parts[name] !== null).map((name) => `${name} ${seconds(parts[name])}`).join(", ");
  if (bar.getAttribute("aria-label") !== label) {
    bar.setAttribute("aria-label", label);
    bar.setAttribute("title", label);
  }
  PARTS.forEach((name, at) => {
    bar.children[at].hidden = parts[name] === null;
    bar.children[at].style.width = `${(100 * (parts[name] ?? 0)) / longest}%`;
  });
}

// The slowest phase of a cut.
export function mostly(parts) {
  const name = PARTS.reduce((most, each) => ((parts[each] ?? 0) > (parts[most] ?? 0) ? each : most));
  return parts[name] === null ? UNKNOWN : `${name} ${seconds(parts[name])}`;
}

export function total(parts) {
  return PARTS.reduce((sum, name) => sum + (parts[name] ?? 0), 0);
}

// The total time of a cut, which ends with the last acknowledgement.
export function inAll(parts) {
  return `${seconds(total(parts))}${parts.ack === null ? " so far" : ""}`;
}

export function legend() {
  return make("ul", { class: "legend" }, ...PARTS.map((name) => make("li", {}, make("i", { class: name, "aria-hidden": "true" }), name)));
}
