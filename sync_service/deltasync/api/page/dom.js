// Making elements, and keeping those that are there: what is read, focused or scrolled stays where it is.

import { UNKNOWN } from "./text.js";

export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((each) => each !== undefined && each !== null));
  return element;
}

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function say(element, text, className = "") {
  write(element, text);
  if (element.className !== className) element.className = className;
}

// Says why a number is not there, where that is so.
export function hint(element, text) {
  if (element.title !== text) element.title = text;
}

let tables = 0;

// A table that is filled again and again, and its heading. Columns: {title, number?, words?, cell(line) -> text | {text, href?, className?, fill?}}.
export class Table {
  constructor(title, columns, key) {
    this.columns = columns;
    this.key = key;
    this.rows = new Map();
    this.body = make("tbody");
    const id = `table-${++tables}`;
    this.heading = make("h2", { id }, title);
    const titles = columns.map((each) => make("th", { scope: "col", class: classes(each) }, each.title));
    const table = make("table", { "aria-labelledby": id }, make("thead", {}, make("tr", {}, ...titles)), this.body);
    this.element = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-labelledby": id }, table);
  }

  fill(lines) {
    const before = this.rows;
    this.rows = new Map();
    for (const line of lines) {
      const name = this.key(line);
      const row = before.get(name) ?? this.row();
      before.delete(name);
      this.rows.set(name, row);
      this.columns.forEach((column, index) => fillCell(row.cells[index], column.cell(line)));
    }
    for (const row of before.values()) {
      if (row.contains(document.activeElement)) this.element.focus();
      row.remove();
    }
    order(this.body, [...this.rows.values()]);
  }

  row() {
    const cells = this.columns.map((each, at) => make(at ? "td" : "th", { class: classes(each), scope: at ? undefined : "row" }));
    return make("tr", {}, ...cells);
  }
}

// A row that is moved loses the focus: others are moved around the one that has it.
function order(body, rows) {
  rows.forEach((row, at) => {
    if (row.contains(document.activeElement)) while (body.children[at] !== row) body.append(body.children[at]);
    else if (body.children[at] !== row) body.insertBefore(row, body.children[at] ?? null);
  });
}

function classes(column) {
  return [column.number && "number", column.words && "words"].filter(Boolean).join(" ") || undefined;
}

function fillCell(cell, said) {
  if (typeof said !== "object") {
    hint(cell, said === UNKNOWN ? "not known" : "");
    return write(cell, said);
  }
  if (said.fill) return said.fill(cell);
  let inner = cell.firstElementChild;
  if (!inner) {
    cell.textContent = "";
    inner = cell.appendChild(document.createElement(said.href ? "a" : "span"));
  }
  if (said.href && inner.getAttribute("href") !== said.href) inner.setAttribute("href", said.href);
  say(inner, said.text, said.className ?? "");
}

// Some lines of many, by a word that they contain.
export class Filter {
  constructor(label, most, changed) {
    this.most = most;
    const id = `filter-${label.replaceAll(" ", "-")}`;
    this.input = make("input", { id, type: "search", autocomplete: "off" });
    this.note = make("span", { class: "soft", role: "status" });
    this.input.addEventListener("input", changed);
    this.element = make("p", {}, make("label", { for: id }, `${label} `), this.input, " ", this.note);
  }

  of(lines, text) {
    const wanted = this.input.value.toLowerCase();
    const found = wanted ? lines.filter((line) => text(line).toLowerCase().includes(wanted)) : lines;
    const left = found.length - this.most;
    const none = wanted && !found.length ? "no match" : "";
    write(this.note, left > 0 ? `the first ${this.most} of ${found.length}` : none);
    return left > 0 ? found.slice(0, this.most) : found;
  }
}
