// One consumer: how far each replica is behind, and why.

import { columnsOf, Filter, make, say, Table } from "./dom.js";
import { LineChart } from "./draw.js";
import { getJson } from "./stream.js";
import { bytes, count, mood, norm, seconds, version } from "./text.js";

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
  const replicas = new Table("Replicas", columnsOf("ReplicaStatus", {
    state: (line) => ({ text: line.state, className: mood(line.state) }),
  }), (line) => line.replica);
  const tables = new Table("Tables", columnsOf("TableLag", {
    table: (line) => ({ text: line.table, href: `#/tables/${encodeURIComponent(line.table)}` }),
  }), (line) => line.table);

  function fillTables(lag) {
    const sorted = [...lag.tables].sort((one, other) => other.rows - one.rows || one.table.localeCompare(other.table));
    tables.fill(filter.of(sorted, (line) => line.table));
  }

  async function show(status) {
    const at = status.consumers.find((each) => each.consumer === name)?.at ?? "";
    const [lag, history] = await Promise.all([getJson(`${at}${path}`), getJson(`${at}${path}/lag/history`)]);
    latest = lag;
    const needed = (line) => mood(line.state) !== "good";
    say(state, lag.state, mood(lag.state, lag.replicas.some(needed)));
    say(reason, lag.reason);
    const offset = `offset ${count(lag.offset)}${lag.release ? ", counted in releases" : ""}`;
    say(facts, `model ${lag.model}, ${version(lag.head)}, ${offset}; ${count(lag.lag.rows)} rows, ${bytes(lag.lag.bytes)} behind`, "soft");
    for (const [chart, column] of charts) chart.draw(history.unix_ms, history.lag[column]);
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
