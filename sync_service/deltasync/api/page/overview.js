// The overview: sync, staleness, throughput, and problems first.

import { columnsOf, Filter, hint, make, say, Table } from "./dom.js";
import { Distribution, fillBar, inAll, legend, LineChart, mostly, total } from "./draw.js";
import { by } from "./processes.js";
import { bytes, clock, count, counted, HOLDING, mood, seconds, UNKNOWN, urgency, version, worst } from "./text.js";

const POINTS = 300;
const SHOWN = 250;
const WRONG_SHOWN = 50;
// Throughput to replicas since the page was opened; null if unknown.
const throughput = { times: [], rows: [], bytes: [] };

export function consumerLink(name) {
  return `#/consumers/${encodeURIComponent(name)}`;
}

// Records the throughput, whatever view is open.
export function note({ unix_ms, rates }) {
  if (unix_ms === throughput.times.at(-1)) return; // Only another process has reported.
  throughput.times.push(unix_ms);
  throughput.rows.push(rates.rows);
  throughput.bytes.push(rates.bytes);
  for (const each of ["times", "rows", "bytes"]) if (throughput[each].length > POINTS) throughput[each].shift();
}

function card(title) {
  const value = make("strong");
  const more = make("span", { class: "soft" });
  return { element: make("li", {}, make("span", {}, title), value, more), value, more };
}

class Flow {
  constructor() {
    this.boxes = ["Trainers", "Service", "Consumers", "Replicas"].map((title) => {
      const text = make("p");
      const list = make("ul", { tabindex: "0", "aria-label": title });
      return { element: make("li", {}, make("strong", {}, title), text, list), text, list };
    });
    const arrows = () => make("li", { class: "arrow", "aria-hidden": "true" }, "→");
    const children = this.boxes.flatMap((box, at) => (at ? [arrows(), box.element] : [box.element]));
    this.element = make("ol", { class: "flow", "aria-label": "From trainers to replicas" }, ...children);
  }

  show(status) {
    const [trainers, service, consumers, replicas] = this.boxes;
    const [ranks, connected, finished] = ["ranks", "connected", "finished"].map((name) => sumOf(status.models, name));
    const done = finished ? `, ${finished} finished` : "";
    fill(trainers, ranks ? `${connected} of ${ranks} ranks connected${done}` : "no trainer since the service started", trainerLines(status));
    const models = status.models.map((each) => [`${each.model}: ${[each.head !== null && version(each.head), each.trouble].filter(Boolean).join(", ")}`, each.trouble ? "bad" : "good"]);
    const missing = status.missing.map((each) => [`${each}: does not answer`, "bad"]);
    const processes = status.processes.flatMap((each) => processLines(each, several(status) ? `${each.process}: ` : ""));
    fill(service, readiness(status), [...missing, ...processes, ...models]);
    const states = [...new Set(status.consumers.map((each) => each.state))].sort((one, other) => urgency(one) - urgency(other));
    const of = (state) => status.consumers.filter((each) => each.state === state);
    const more = known(status) ? "" : ", others unknown";
    fill(consumers, `${status.consumers.length} in total${more}`, states.map((state) => [`${of(state).length} ${state}`, worst(of(state).map(moodOf))]));
    const wrong = status.consumers.flatMap((each) => each.replicas.map(({ replica, reason }) => [`${each.consumer}/${replica}: ${reason}`, "bad", consumerLink(each.consumer)]));
    const left = wrong.length > WRONG_SHOWN ? [[`and ${wrong.length - WRONG_SHOWN} more`, "bad"]] : [];
    fill(replicas, `${sumOf(status.consumers, "connected")} of ${sumOf(status.consumers, "fleet")} connected${more}`, [...wrong.slice(0, WRONG_SHOWN), ...left]);
  }
}

function sumOf(lines, name) {
  return lines.reduce((all, each) => all + each[name], 0);
}

function trainerLines({ models, trainers }) {
  const state = (each) => (each.connected ? ["connected", "good"] : each.finished ? ["finished", ""] : [`away, ${each.left}`, "bad"]);
  const lines = trainers.map((each) => {
    const [words, className] = state(each);
    return [`${each.model} rank ${each.rank}: ${words}, ${seconds(each.since_seconds)}`, className];
  });
  for (const { model, ranks } of models) {
    const unseen = ranks - trainers.filter((each) => each.model === model).length;
    if (unseen > 0) lines.push([`${model}: ${unseen === 1 ? "1 rank has" : `${unseen} ranks have`} not connected since the service started`, "warn"]);
  }
  return lines;
}

function several(status) {
  return status.processes.length + status.missing.length > 1;
}

function readiness(status) {
  const ready = status.processes.filter((each) => each.ready).length;
  if (several(status)) return `${ready} of ${status.processes.length + status.missing.length} processes ready`;
  return ready ? "ready" : "not ready";
}

function processLines({ checks, troubles, work, probe, volumes }, name) {
  const lines = checks.filter((each) => each.trouble).map((each) => [`${each.check}: ${each.trouble}`, "bad"]);
  if (probe) lines.push([probe.trouble ? `probe: ${probe.trouble}` : `probe: ${seconds(probe.seconds)} from a publisher to a replica, ${seconds(probe.age_seconds)} ago`, probe.trouble ? "bad" : "good"]);
  lines.push(...troubles.map((each) => [each, "warn"]), ...work.map((each) => [each, ""]));
  const room = (each) => (each.free_bytes === null ? "stored by brokers" : `${bytes(each.free_bytes)} free`);
  lines.push(...volumes.map((each) => [`${each.volume}: ${each.refused || room(each)}`, each.refused ? "bad" : "good"]));
  return lines.map(([text, className]) => [`${name}${text}`, className]);
}

function fill(box, text, lines) {
  say(box.text, text);
  while (box.list.children.length > lines.length) box.list.lastChild.remove();
  lines.forEach(([text, className, href], at) => fillLine(box.list.children[at] ?? box.list.appendChild(make("li")), text, className, href));
}

function fillLine(line, text, className, href) {
  const link = line.querySelector("a");
  if (!href) return say(line, text, className);
  if (link) {
    link.setAttribute("href", href);
    return say(link, text, className);
  }
  line.className = "";
  line.replaceChildren(make("a", { href, class: className }, text));
}

// Whether the page knows all consumers. It lacks those of a process that does not answer, and of a model without a head,
// which has no owner or is still recovering.
function known({ missing, models, processes }) {
  return !missing.length && models.every((each) => each.head !== null) && processes.every((each) => each.ready);
}

// "All" promises that there are consumers and the page knows all of them, that checksums have confirmed every replica,
// that no replica needs attention, and that cuts can be sealed.
function inSync(status) {
  const { consumers, models } = status;
  const lagging = consumers.filter((each) => !HOLDING.has(each.state));
  if (lagging.length) return [`${lagging.length} of ${consumers.length} not`, worst(lagging.map((each) => mood(each.state)))];
  if (!known(status)) return ["unknown for some", "warn"];
  if (!consumers.length) return ["no consumer", "warn"];
  const wrong = wrongReplicas(status);
  if (wrong) return [`all but ${counted(wrong, "replica")}`, "bad"];
  const stuck = models.filter((each) => each.trouble).length;
  if (stuck) return [`all, but ${counted(stuck, "model")} cannot seal`, "bad"];
  return consumers.some((each) => each.state === "delivered") ? ["all, but not verified", "warn"] : ["all", "good"];
}

function moodOf(consumer) {
  return mood(consumer.state, consumer.replicas.length > 0);
}

function wrongReplicas({ consumers }) {
  return consumers.reduce((all, each) => all + each.replicas.length, 0);
}

// The last cuts, and the older versions that are kept, newest first.
function cutsAndKept({ cuts, kept, unix_ms }) {
  const key = (line) => `${line.model}/${line.version}`;
  const lines = new Map(cuts.map((each) => [key(each), { ...each, kept: [] }]));
  for (const each of kept) {
    if (!lines.has(key(each))) lines.set(key(each), { ...each, seconds_ago: Math.max(0, unix_ms / 1000 - each.sealed_unix_ns / 1e9), rows: null, bytes: null, seconds: null, kept: [] });
    lines.get(key(each)).kept.push(each);
  }
  return [...lines.values()].sort(by("seconds_ago"));
}

function keptAs({ name, followers }) {
  return `${name || "without a name"}${followers.length ? `, followed by ${followers.join(", ")}` : ""}`;
}

export function overviewView() {
  const cards = { sync: card("In sync?"), stale: card("How stale?"), much: card("How much?"), cut: card("Last cut") };
  const flow = new Flow();
  const filter = new Filter("Consumer", SHOWN, () => latest && fillConsumers(latest));
  let latest = null;
  let longest = 1;
  const consumers = new Table("Consumers, most urgent first", columnsOf("ConsumerStatus", {
    consumer: (line) => ({ text: line.consumer, href: consumerLink(line.consumer) }),
    state: (line) => ({ text: line.state, className: moodOf(line) }),
  }), (line) => line.consumer);
  const models = new Table("Models", columnsOf("ModelStatus"), (line) => line.model);
  const cuts = new Table("Cuts and kept versions", [
    { title: "version", cell: (line) => `${line.model} ${count(line.version)}` },
    { title: "kept as", words: true, cell: (line) => line.kept.map(keptAs).join("; ") },
    { title: "time of each phase", cell: (line) => (line.seconds ? { fill: (cell) => fillBar(cell, line.seconds, longest) } : UNKNOWN) },
    { title: "slowest phase", number: true, cell: (line) => (line.seconds ? mostly(line.seconds) : UNKNOWN) },
    { title: "total", number: true, cell: (line) => (line.seconds ? inAll(line.seconds) : UNKNOWN) },
    { title: "rows", number: true, cell: (line) => count(line.rows) },
    { title: "bytes", number: true, cell: (line) => bytes(line.bytes) },
    { title: "ago", number: true, cell: (line) => seconds(line.seconds_ago) },
  ], (line) => `${line.model}/${line.version}`);
  const events = new Table("Events", [
    { title: "time", cell: (line) => clock(line.unix_ns / 1e6) },
    { title: "event", cell: (line) => ({ text: line.event.replaceAll("_", " "), className: { warning: "warn", error: "bad" }[line.level] ?? "" }) },
    { title: "subject", words: true, cell: (line) => Object.entries({ ...(line.process ? { process: line.process } : {}), ...line.subject }).map(([name, value]) => `${name} ${value}`).join(", ") },
    { title: "why", words: true, cell: (line) => `${line.text}${line.repeats ? ` (${count(line.repeats)} more times)` : ""}` },
  ], (line) => `${line.process}/${line.number}`);
  const charts = { rows: new LineChart("Rows sent per second since this page was opened", count), bytes: new LineChart("Bytes sent per second", bytes), fresh: new Distribution("Freshness of deliveries") };

  function fillConsumers(status) {
    const sorted = [...status.consumers].sort((one, other) => urgency(one.state, one.replicas.length > 0) - urgency(other.state, other.replicas.length > 0) || one.consumer.localeCompare(other.consumer));
    consumers.fill(filter.of(sorted, (line) => `${line.consumer} ${line.model} ${line.state} ${line.reason}`));
  }

  function fillCards(status) {
    const [answer, className] = inSync(status);
    say(cards.sync.value, answer, className);
    const least = known(status) ? "" : "at least ";
    const unproven = status.consumers.filter((each) => each.state === "delivered").length;
    const replicas = counted(sumOf(status.consumers, "fleet"), "replica");
    const wrong = wrongReplicas(status);
    const notes = [counted(status.consumers.length, "consumer"), unproven && `${unproven} not verified`, wrong ? `${wrong} of ${replicas} to look at` : replicas];
    say(cards.sync.more, `${least}${notes.filter(Boolean).join(", ")}`, wrong ? "bad" : "soft");
    // A consumer of an empty model cannot be behind.
    const followed = status.consumers.filter((each) => each.state !== "empty" && each.lag);
    say(cards.stale.value, followed.length ? `${least}${seconds(Math.max(...followed.map((each) => each.lag.seconds)))}` : "unknown");
    const p99 = Math.max(...status.consumers.map((each) => each.freshness.p99 ?? -1));
    say(cards.stale.more, p99 < 0 ? "freshness not measured yet" : `deliveries within ${seconds(p99)} (p99, slowest consumer)`, "soft");
    const { rows, bytes: sent, published } = status.rates;
    const measured = ![rows, sent, published].includes(null);
    say(cards.much.value, measured ? `${status.missing.length ? "at least " : ""}${bytes(sent)}/s` : UNKNOWN);
    hint(cards.much.value, measured ? "" : "measuring");
    say(cards.much.more, measured ? `${count(rows)} rows/s to replicas; ${bytes(published)}/s from trainers` : "measuring", "soft");
    const newest = status.cuts[0];
    say(cards.cut.value, newest ? `${seconds(newest.seconds_ago)} ago` : known(status) ? "none" : "unknown");
    say(cards.cut.more, newest ? `version ${count(newest.version)} of ${newest.model}` : "since the service started", "soft");
  }

  function show(status) {
    latest = status;
    fillCards(status);
    flow.show(status);
    fillConsumers(status);
    longest = Math.max(1e-9, ...status.cuts.map((each) => total(each.seconds)));
    models.fill(status.models);
    cuts.fill(cutsAndKept(status));
    events.fill([...status.events].reverse());
    charts.rows.draw(throughput.times, throughput.rows);
    charts.bytes.draw(throughput.times, throughput.bytes);
    const counts = status.freshness_bounds.map((_, at) => status.consumers.reduce((sum, each) => sum + each.freshness.counts[at], 0));
    counts.push(status.consumers.reduce((sum, each) => sum + each.freshness.counts.at(-1), 0));
    charts.fresh.draw(status.freshness_bounds, counts);
  }

  const elements = [
    make("ul", { class: "cards" }, ...Object.values(cards).map((each) => each.element)),
    make("h2", {}, "From trainers to replicas"), flow.element,
    consumers.heading, filter.element, consumers.element,
    models.heading, models.element,
    cuts.heading, legend(), cuts.element,
    make("h2", {}, "Throughput and freshness"), make("div", { class: "charts" }, charts.rows.element, charts.bytes.element, charts.fresh.element),
    events.heading, events.element,
  ];
  return { title: "deltasync", elements, show };
}
