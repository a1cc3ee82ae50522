// All tables, and one table with the lag of its consumers.

import { Filter, make, Table } from "./dom.js";
import { by } from "./processes.js";
import { getLists } from "./stream.js";
import { bytes, count, mood, norm, oldestRow, percent, version } from "./text.js";

const SHOWN = 200;
// The list of tables hardly ever changes.
const AGAIN_MS = 10_000;

export function tablesView() {
  let latest = [];
  let askedMs = -Infinity;
  const filter = new Filter("Table", SHOWN, () => fill());
  const table = new Table("Tables", [
    { title: "table", cell: (line) => ({ text: line.table, href: `#/tables/${encodeURIComponent(line.table)}` }) },
    { title: "model", cell: (line) => line.model },
    { title: "kind", cell: (line) => line.kind },
    { title: "rows", number: true, cell: (line) => count(line.rows) },
    { title: "dim", number: true, cell: (line) => count(line.dim) },
    { title: "type", cell: (line) => line.dtype },
    { title: "bytes", number: true, cell: (line) => bytes(line.bytes) },
    { title: "trouble", words: true, cell: (line) => line.refused || (line.ranks_differ ? "the trainer's ranks have different rows" : "") },
  ], (line) => `${line.model}/${line.table}`);

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
  const table = new Table("Consumers", [
    { title: "consumer", cell: (line) => ({ text: line.consumer, href: `#/consumers/${encodeURIComponent(line.consumer)}` }) },
    { title: "model", cell: (line) => line.model },
    { title: "state", cell: (line) => ({ text: line.state, className: mood(line.state) }) },
    { title: "rows behind", number: true, cell: (line) => count(line.lag.rows) },
    { title: "bytes", number: true, cell: (line) => bytes(line.lag.bytes) },
    { title: "oldest row", number: true, cell: (line) => oldestRow(line.lag) },
    { title: "unsent norm", number: true, cell: (line) => norm(line.lag.unsent_norm) },
    { title: "unsent", number: true, cell: (line) => percent(line.lag.unsent_share) },
  ], (line) => `${line.model}/${line.consumer}`);

  async function show(status) {
    const details = await getLists(status.addresses, `/tables/${encodeURIComponent(name)}`);
    const texts = details.map(({ table: each }) => `${each.model}: ${each.kind}, ${count(each.rows)} rows of ${each.dim} ${each.dtype}, ${bytes(each.bytes)}, ${version(each.head)}${each.refused ? `; refused: ${each.refused}` : ""}`);
    about.replaceChildren(...texts.map((text) => make("p", {}, text)));
    table.fill(details.flatMap((each) => each.consumers.map((line) => ({ ...line, model: each.table.model }))));
  }

  return { title: `Table ${name}`, elements: [make("h2", {}, `Table ${name}`), about, table.heading, table.element], show };
}
