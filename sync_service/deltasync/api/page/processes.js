// Follows each process of the service, and combines their reports.

import { follow, getJson, Refused } from "./stream.js";

const AGAIN_MS = 2000;
// A process reports about once a second, a very large one every few seconds.
export const STALE_MS = 10_000;
// Numbers of cuts and events to show, as many as one process reports.
const CUTS = 20;
const EVENTS = 30;

// Follows the process of this page, and all that it lists, until `signal` aborts. Calls `heard` with each combined
// overview, and `lost` with an error if no process is connected or ours refuses.
export async function hearAll(heard, lost, signal) {
  const statuses = new Map(); // By address; empty for our own process.
  const tried = new Set(); // Names of processes that are connected or failed a moment ago.

  function tell() {
    const fresh = [...statuses.values()].filter((each) => performance.now() - each.ms < STALE_MS);
    if (fresh.length && !signal.aborted) heard(together(fresh));
  }

  function take(at, status) {
    statuses.set(at, { at, status, rates: rates(statuses.get(at)?.status, status), ms: performance.now() });
    for (const each of status.processes) tried.add(each.process);
    tell();
    if (status.missing.some((name) => !tried.has(name))) learn(at);
  }

  async function learn(at) {
    const lines = await getJson(`${at}/processes`).catch(() => []);
    for (const { process, http, alive } of lines) {
      if (!alive || tried.has(process) || signal.aborted) continue;
      tried.add(process);
      hear(http).then(() => tried.delete(process)); // It may return at another address.
    }
  }

  async function hear(at) {
    try {
      await follow(`${at}/status`, (status) => take(at, status), signal);
    } catch (error) {
      if (signal.aborted) return;
      statuses.delete(at);
      const refused = !at && error instanceof Refused && [401, 403].includes(error.status);
      if (refused || !statuses.size) lost(error);
      else tell();
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }

  while (!signal.aborted) await hear("");
}

// Bytes and rows per second of a process, or null if unknown. Counters restart with the process and with a consumer. A
// rate therefore needs two reports over one connection, and is unknown if a counter decreased between them.
function rates(before, now) {
  const passed = before ? (now.unix_ms - before.unix_ms) / 1000 : 0;
  const rate = (name, key, counter) => {
    if (passed <= 0) return null;
    const counted = new Map(before[name].map((each) => [each[key], each[counter]]));
    const grown = now[name].map((each) => each[counter] - (counted.get(each[key]) ?? 0));
    return grown.some((each) => each < 0) ? null : sum(grown) / passed;
  };
  return {
    rows: rate("consumers", "consumer", "released_rows"),
    bytes: rate("consumers", "consumer", "released_bytes"),
    published: rate("models", "model", "published_bytes"),
  };
}

function sum(numbers) {
  return numbers.includes(null) ? null : numbers.reduce((all, each) => all + each, 0);
}

function together(all) {
  const lines = (name) => all.flatMap(({ at, status }) => status[name].map((each) => ({ ...each, at })));
  const processes = lines("processes").sort(by("process"));
  const names = new Set(processes.map((each) => each.process));
  return {
    ...all[0].status,
    addresses: all.map((each) => each.at),
    rates: Object.fromEntries(["rows", "bytes", "published"].map((name) => [name, sum(all.map(({ rates }) => rates[name]))])),
    processes,
    missing: [...new Set(all.flatMap(({ status }) => status.missing))].filter((each) => !names.has(each)).sort(),
    models: known(lines("models"), "model"),
    trainers: lines("trainers").sort(by("model", "rank")),
    consumers: known(lines("consumers"), "consumer"),
    cuts: lines("cuts").sort(by("seconds_ago")).slice(0, CUTS),
    kept: lines("kept"),
    events: lines("events").sort(by("unix_ns")).slice(-EVENTS),
  };
}

// Two processes may report one model; the owner is the one that knows its head.
function known(lines, key) {
  const owned = new Map();
  for (const line of lines) if (line.head !== null || !owned.has(line[key])) owned.set(line[key], line);
  return [...owned.values()].sort(by(key));
}

export function by(...keys) {
  return (one, other) => keys.map((key) => (one[key] > other[key]) - (one[key] < other[key])).find((each) => each) ?? 0;
}
