// One consumer: how far each replica is behind, and why.

import { Filter, make, say, Table } from "./dom.js";
import { LineChart } from "./draw.js";
import { getJson } from "./stream.js";
import { bytes, count, mood, norm, oldestRow, percent, seconds, version } from "./text.js";

const SHOWN = 200;

export function consumerView(name) {
  const path = `/consumers/${encodeURIComponent(name)}`;
  const state = make("strong");
  const reason = make("p");
  const facts = make("p", { class: "soft" });
  const charts = [
    [new LineChart("Versions behind", count), "versions"],
    [new LineChart("Seconds behind", seconds), "seconds"],
    [new LineChart("Unsent norm", norm), "unsent_norm"],
  ];
  let latest = null;
  const filter = new Filter("Table", SHOWN, () => latest && fillTables(latest));
  const replicas = new Table("Replicas", [
    { title: "replica", cell: (line) => line.replica },
    { title: "state", cell: (line) => ({ text: line.state, className: mood(line.state) }) },
    { title: "for", number: true, cell: (line) => seconds(line.since_seconds) },
    { title: "why", words: true, cell: (line) => line.reason },
    { title: "offset", number: true, cell: (line) => count(line.offset) },
    { title: "versions behind", number: true, cell: (line) => count(line.lag.versions) },
    { title: "rows behind", number: true, cell: (line) => count(line.lag.rows) },
    { title: "time behind", number: true, cell: (line) => seconds(line.lag.seconds) },
  ], (line) => line.replica);
  const tables = new Table("Tables", [
    { title: "table", cell: (line) => ({ text: line.table, href: `#/tables/${encodeURIComponent(line.table)}` }) },
    { title: "rows", number: true, cell: (line) => count(line.rows) },
    { title: "bytes", number: true, cell: (line) => bytes(line.bytes) },
    { title: "oldest row", number: true, cell: oldestRow },
    { title: "unsent norm", number: true, cell: (line) => norm(line.unsent_norm) },
    { title: "unsent", number: true, cell: (line) => percent(line.unsent_share) },
  ], (line) => line.table);

  function fillTables(lag) {
    const sorted = [...lag.tables].sort((one, other) => other.rows - one.rows || one.table.localeCompare(other.table));
    tables.fill(filter.of(sorted, (line) => line.table));
  }

  async function show(status) {
    const at = status.consumers.find((each) => each.consumer === name)?.at ?? "";
    const [lag, history] = await Promise.all([getJson(`${at}${path}/lag`), getJson(`${at}${path}/lag/history`)]);
    latest = lag;
    const needed = (line) => mood(line.state) !== "good";
    say(state, lag.state, mood(lag.state, lag.replicas.some(needed)));
    say(reason, lag.reason);
    const offset = `offset ${count(lag.offset)}${lag.release ? ", counted in releases" : ""}`;
    say(facts, `model ${lag.model}, ${version(lag.head)}, ${offset}; ${count(lag.lag.rows)} rows, ${bytes(lag.lag.bytes)} behind`, "soft");
    for (const [chart, column] of charts) chart.draw(history.unix_ms, history[column]);
    replicas.fill([...lag.replicas].sort((one, other) => needed(other) - needed(one) || other.lag.versions - one.lag.versions));
    fillTables(lag);
  }

  const elements = [
    make("h2", {}, `Consumer ${name}: `, state), reason, facts,
    make("div", { class: "charts" }, ...charts.map(([chart]) => chart.element)),
    replicas.heading, replicas.element,
    tables.heading, filter.element, tables.element,
  ];
  return { title: `Consumer ${name}`, elements, show };
}
