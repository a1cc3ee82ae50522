// Everything at a glance: is it in sync, how stale, how much; and what is wrong, first.

import { Filter, make, say, Table } from "./dom.js";
import { Distribution, fillBar, legend, LineChart, mostly, total } from "./draw.js";
import { bytes, clock, count, counted, HOLDING, mood, percent, seconds, urgency, worst } from "./text.js";

const POINTS = 300;
const SHOWN = 250;
const WRONG_SHOWN = 50;
const throughput = { times: [], rows: [], bytes: [], published: 0, last: null };

export function consumerLink(name) {
  return `#/consumers/${encodeURIComponent(name)}`;
}

// By how much a sum over some lines has grown, of those that were there before.
function growth(lines, before, key, name) {
  return lines.reduce((all, each) => all + Math.max(0, each[name] - (before.get(each[key])?.[name] ?? each[name])), 0);
}

// Rows and bytes a second that replicas are sent, and trainers publish, from what that was in all.
function note(status) {
  const last = throughput.last;
  const by = (lines, key) => new Map(lines.map((each) => [each[key], each]));
  if (status.unix_ms === last?.ms) return; // Only another process had something new.
  throughput.last = { ms: status.unix_ms, sent: by(status.consumers, "consumer"), published: by(status.models, "model") };
  if (!last || status.unix_ms < last.ms) return;
  const passed = (status.unix_ms - last.ms) / 1000;
  throughput.times.push(status.unix_ms);
  throughput.rows.push(growth(status.consumers, last.sent, "consumer", "released_rows") / passed);
  throughput.bytes.push(growth(status.consumers, last.sent, "consumer", "released_bytes") / passed);
  throughput.published = growth(status.models, last.published, "model", "published_bytes") / passed;
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
    fill(trainers, `${status.trainers.filter((each) => each.connected).length} of ${status.trainers.length} ranks connected`,
      status.trainers.map((each) => [`${each.model} rank ${each.rank}: ${each.connected ? "connected" : `away, ${each.left}`}, ${seconds(each.since_seconds)}`, each.connected ? "good" : "bad"]));
    const models = status.models.map((each) => [`${each.model}: version ${count(each.head)}${each.trouble ? `, ${each.trouble}` : ""}`, each.trouble ? "bad" : "good"]);
    const missing = status.missing.map((each) => [`${each}: does not answer`, "bad"]);
    const processes = status.processes.flatMap((each) => processLines(each, several(status) ? `${each.process}: ` : ""));
    fill(service, readiness(status), [...missing, ...processes, ...models]);
    const states = new Map();
    for (const each of status.consumers) states.set(each.state, (states.get(each.state) ?? 0) + 1);
    const sorted = [...states].sort(([one], [other]) => urgency(one) - urgency(other));
    fill(consumers, `${status.consumers.length} in all`, sorted.map(([state, number]) => [`${number} ${state}`, mood(state)]));
    const all = status.consumers.reduce((sum, each) => sum + each.replicas, 0);
    const here = status.consumers.reduce((sum, each) => sum + each.connected, 0);
    const wrong = status.consumers.flatMap((each) => each.wrong.map(({ replica, reason }) => [`${each.consumer}/${replica}: ${reason}`, "bad", consumerLink(each.consumer)]));
    const more = wrong.length > WRONG_SHOWN ? [[`and ${wrong.length - WRONG_SHOWN} more`, "bad"]] : [];
    fill(replicas, `${here} of ${all} connected`, [...wrong.slice(0, WRONG_SHOWN), ...more]);
  }
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
  const room = (each) => (each.free_bytes === null ? "kept by brokers" : `${bytes(each.free_bytes)} free`);
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

// "All" is a promise: that there are consumers, that all of them are known, and that each holds what it should.
// Nobody knows the consumers of a model without a head: no process has it, or its process is still recovering it.
function inSync(status) {
  const { consumers, missing, models, processes } = status;
  const lagging = consumers.filter((each) => !HOLDING.has(each.state));
  if (lagging.length) return [`${lagging.length} of ${consumers.length} not`, worst(lagging.map((each) => mood(each.state)))];
  const known = !missing.length && models.every((each) => each.head !== null) && processes.every((each) => each.ready);
  if (!known) return ["not known of all", "warn"];
  return consumers.length ? ["all", "good"] : ["no consumer", "warn"];
}

export function overviewView() {
  const cards = { sync: card("In sync?"), stale: card("How stale?"), much: card("How much?"), cut: card("Last cut") };
  const flow = new Flow();
  const filter = new Filter("Consumer", SHOWN, () => latest && fillConsumers(latest));
  let latest = null;
  let longest = 1;
  const consumers = new Table("Consumers, those that need somebody first", [
    { title: "consumer", cell: (line) => ({ text: line.consumer, href: consumerLink(line.consumer) }) },
    { title: "state", cell: (line) => ({ text: line.state, className: mood(line.state) }) },
    { title: "why", words: true, cell: (line) => line.reason },
    { title: "versions", number: true, cell: (line) => count(line.versions) },
    { title: "behind", number: true, cell: (line) => seconds(line.seconds) },
    { title: "unsent", number: true, wide: true, cell: (line) => percent(line.unsent_share) },
    { title: "replicas", number: true, cell: (line) => `${line.connected}/${line.replicas}` },
    { title: "fresh, p50", number: true, wide: true, cell: (line) => seconds(line.freshness.p50) },
    { title: "p99", number: true, wide: true, cell: (line) => seconds(line.freshness.p99) },
  ], (line) => line.consumer);
  const cuts = new Table("The last cuts", [
    { title: "version", cell: (line) => `${line.model} ${count(line.version)}` },
    { title: "where its time went", cell: (line) => ({ fill: (cell) => fillBar(cell, line.seconds, longest) }) },
    { title: "mostly", number: true, cell: (line) => mostly(line.seconds) },
    { title: "in all", number: true, cell: (line) => seconds(total(line.seconds)) },
    { title: "rows", number: true, wide: true, cell: (line) => count(line.rows) },
    { title: "bytes", number: true, wide: true, cell: (line) => bytes(line.bytes) },
    { title: "ago", number: true, cell: (line) => seconds(line.seconds_ago) },
  ], (line) => `${line.model}/${line.version}`);
  const events = new Table("What has happened last", [
    { title: "time", cell: (line) => clock(line.unix_ns / 1e6) },
    { title: "event", cell: (line) => ({ text: line.event.replaceAll("_", " "), className: { warning: "warn", error: "bad" }[line.level] ?? "" }) },
    { title: "to whom", cell: (line) => Object.entries({ ...(line.process ? { process: line.process } : {}), ...line.subject }).map(([name, value]) => `${name} ${value}`).join(", ") },
    { title: "why", words: true, cell: (line) => `${line.text}${line.repeats ? ` (${count(line.repeats)} more times)` : ""}` },
  ], (line) => `${line.process}/${line.number}`);
  const charts = { rows: new LineChart("Rows sent a second, since this page was opened", count), bytes: new LineChart("Bytes sent a second, likewise", bytes), fresh: new Distribution("Freshness of deliveries") };

  function fillConsumers(status) {
    const sorted = [...status.consumers].sort((one, other) => urgency(one.state) - urgency(other.state) || one.consumer.localeCompare(other.consumer));
    consumers.fill(filter.of(sorted, (line) => `${line.consumer} ${line.model} ${line.state} ${line.reason}`));
  }

  function fillCards(status) {
    const [answer, className] = inSync(status);
    say(cards.sync.value, answer, className);
    const unproven = status.consumers.filter((each) => each.state === "delivered").length;
    const wrong = status.consumers.reduce((all, each) => all + each.wrong.length, 0);
    const notes = [counted(status.consumers.length, "consumer"), unproven && `${unproven} without proof`, wrong && `look at ${counted(wrong, "replica")}`];
    say(cards.sync.more, notes.filter(Boolean).join(", "), wrong ? "bad" : "soft");
    const followed = status.consumers.filter((each) => each.replicas && each.seconds !== null);
    say(cards.stale.value, followed.length ? seconds(Math.max(...followed.map((each) => each.seconds))) : "not known");
    const p99 = Math.max(...status.consumers.map((each) => each.freshness.p99 ?? -1));
    say(cards.stale.more, p99 < 0 ? "nothing delivered yet" : `deliveries within ${seconds(p99)} (p99, slowest consumer)`, "soft");
    say(cards.much.value, throughput.bytes.length ? `${bytes(throughput.bytes.at(-1))}/s` : "0 B/s");
    say(cards.much.more, throughput.rows.length ? `${count(throughput.rows.at(-1))} rows a second to replicas; ${bytes(throughput.published)}/s from trainers` : "", "soft");
    const newest = status.cuts[0];
    say(cards.cut.value, newest ? `${seconds(newest.seconds_ago)} ago` : "none");
    say(cards.cut.more, newest ? `version ${count(newest.version)} of ${newest.model}` : "since the service started", "soft");
  }

  function show(status) {
    latest = status;
    note(status);
    fillCards(status);
    flow.show(status);
    fillConsumers(status);
    longest = Math.max(1e-9, ...status.cuts.map((each) => total(each.seconds)));
    cuts.fill(status.cuts);
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
    make("h2", {}, "Consumers"), filter.element, consumers.element,
    make("h2", {}, "Cuts"), legend(), cuts.element,
    make("h2", {}, "Throughput and freshness"), make("div", { class: "charts" }, charts.rows.element, charts.bytes.element, charts.fresh.element),
    make("h2", {}, "Events"), events.element,
  ];
  return { title: "deltasync", elements, show };
}
