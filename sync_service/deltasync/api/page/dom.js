// Makes elements and updates them in place, which keeps focus and scroll positions.

import { COLUMNS } from "./columns.js";
import { shown, UNKNOWN } from "./text.js";

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

// Explains a missing number.
export function hint(element, text) {
  if (element.title !== text) element.title = text;
}

// The columns of a record's table, of which `own` has other cells by the names of their fields.
export function columnsOf(record, own = {}) {
  return COLUMNS[record].map(({ names, title, unit, number }) => {
    const value = (line) => names.reduce((inner, name) => inner?.[name] ?? null, line);
    const cell = own[names.at(-1)] ?? ((line) => shown(value(line), unit));
    return { title, number: number || unit !== "", words: ["reason", "trouble", "refused"].includes(names.at(-1)), cell };
  });
}

let tables = 0;

// A table, refilled on every update, and its heading. Columns: {title, number?, words?, cell(line) -> text | {text, href?, className?, fill?}}.
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

// A row would lose the focus if it moved, so the other rows move around it.
function order(body, rows) {
  rows.forEach((row, at) => {
    if (row.contains(document.activeElement)) while (body.children[at] !== row) body.append(body.children[at]);
    else if (body.children[at] !== row) body.insertBefore(row, body.children[at] ?? null);
  });
}

function classes(column) {
  return [column.number && "number", column.words && "words"].filter(Boolean).join(" ") || undefined;
}

function fillCell(cell, content) {
  if (typeof content !== "object") {
    hint(cell, content === UNKNOWN ? "unknown" : "");
    return write(cell, content);
  }
  if (content.fill) return content.fill(cell);
  let inner = cell.firstElementChild;
  if (!inner) {
    cell.textContent = "";
    inner = cell.appendChild(document.createElement(content.href ? "a" : "span"));
  }
  if (content.href && inner.getAttribute("href") !== content.href) inner.setAttribute("href", content.href);
  say(inner, content.text, content.className ?? "");
}

// A search field that selects lines by a word.
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
    const query = this.input.value.toLowerCase();
    const matches = query ? lines.filter((line) => text(line).toLowerCase().includes(query)) : lines;
    const left = matches.length - this.most;
    const none = query && !matches.length ? "no match" : "";
    write(this.note, left > 0 ? `the first ${this.most} of ${matches.length}` : none);
    return left > 0 ? matches.slice(0, this.most) : matches;
  }
}
