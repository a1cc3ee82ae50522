// All tables, and one table with the lag of its consumers.

import { columnsOf, Filter, make, Table } from "./dom.js";
import { by } from "./processes.js";
import { getLists } from "./stream.js";
import { bytes, count, mood, version } from "./text.js";

const SHOWN = 200;
// The list of tables hardly ever changes.
const AGAIN_MS = 10_000;

export function tablesView() {
  let latest = [];
  let askedMs = -Infinity;
  const filter = new Filter("Table", SHOWN, () => fill());
  const table = new Table("Tables", columnsOf("TableStatus", {
    table: (line) => ({ text: line.table, href: `#/tables/${encodeURIComponent(line.table)}` }),
  }), (line) => `${line.model}/${line.table}`);

  function fill() {
    table.fill(filter.of(latest, (line) => `${line.table} ${line.model}`));
  }

  async function show(status) {
    if (performance.now() - askedMs < AGAIN_MS) return;
    latest = (await getLists(status.addresses, "/tables")).sort(by("model", "table"));
    askedMs = performance.now();
    fill();
  }

  return { title: "Tables", elements: [table.heading, filter.element, table.element], show };
}

export function tableView(name) {
  const about = make("div");
  const lag = columnsOf("TableLag").slice(1).map(({ cell, ...rest }) => ({ ...rest, cell: (line) => cell(line.lag) }));
  const table = new Table("Consumers", [
    { title: "consumer", cell: (line) => ({ text: line.consumer, href: `#/consumers/${encodeURIComponent(line.consumer)}` }) },
    { title: "model", cell: (line) => line.model },
    { title: "state", cell: (line) => ({ text: line.state, className: mood(line.state) }) },
    ...lag,
  ], (line) => `${line.model}/${line.consumer}`);

  async function show(status) {
    const details = await getLists(status.addresses, `/tables/${encodeURIComponent(name)}`);
    const texts = details.map((each) => `${each.model}: ${each.kind}, ${count(each.rows)} rows of ${each.dim} ${each.dtype}, ${bytes(each.bytes)}, ${version(each.head)}${each.refused ? `; refused: ${each.refused}` : ""}`);
    about.replaceChildren(...texts.map((text) => make("p", {}, text)));
    table.fill(details.flatMap((each) => each.consumers.map((line) => ({ ...line, model: each.model }))));
  }

  return { title: `Table ${name}`, elements: [make("h2", {}, `Table ${name}`), about, table.heading, table.element], show };
}
