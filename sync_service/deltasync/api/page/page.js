// The page: follows all processes of the service, and shows the view that the address names.

import { say } from "./dom.js";
import { consumerView } from "./consumer.js";
import { note, overviewView } from "./overview.js";
import { hearAll, STALE_MS } from "./processes.js";
import { Refused } from "./stream.js";
import { tablesView, tableView } from "./tables.js";
import { clock } from "./text.js";

const main = document.getElementById("main");
const connection = document.getElementById("connection");
const time = document.getElementById("time");
const trouble = document.getElementById("trouble");
const access = document.getElementById("access");
let view = null;
let newest = null;
let heardMs = 0;
let hearing = new AbortController();

function viewOf(hash) {
  const [, kind, name] = /^#\/(\w+)(?:\/(.*))?$/.exec(hash) ?? [];
  if (kind === "consumers" && name) return consumerView(decoded(name));
  if (kind === "tables") return name ? tableView(decoded(name)) : tablesView();
  return overviewView();
}

// A name from an address, possibly written by hand.
function decoded(name) {
  try {
    return decodeURIComponent(name);
  } catch {
    return name;
  }
}

function open() {
  view = { ...viewOf(location.hash), pending: false, shownMs: null };
  document.title = view.title === "deltasync" ? view.title : `${view.title} - deltasync`;
  main.replaceChildren(...view.elements);
  main.hidden = false;
  say(trouble, "");
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === (location.hash || "#/")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (newest) show();
}

// One request at a time. While one is pending, only the newest status is kept, and shown afterwards.
async function show() {
  const shown = view;
  const status = newest;
  if (shown.pending) return;
  shown.pending = true;
  try {
    await shown.show(status);
    shown.shownMs = Date.now();
    if (shown === view) recover();
  } catch (error) {
    if (shown === view) fail(error);
  } finally {
    shown.pending = false;
  }
  if (shown === view && newest && newest !== status) show();
}

function recover() {
  main.hidden = false;
  say(trouble, "");
}

// The view is out of date, or may be.
function fail(error) {
  const gone = error instanceof Refused && error.status === 404;
  main.hidden = gone || view.shownMs === null;
  const since = main.hidden ? "" : `; showing the state of ${clock(view.shownMs)}`;
  say(trouble, `${error.message}${since}`, "bad");
}

function lock(error) {
  hearing.abort();
  access.hidden = false;
  say(document.getElementById("refusal"), error.message);
  say(connection, "The service requires a token", "bad");
  newest = null;
  say(time, "");
  main.replaceChildren();
}

function hold(status) {
  const first = newest === null;
  newest = status;
  heardMs = performance.now();
  note(status);
  access.hidden = true;
  say(time, clock(status.unix_ms));
  sayLive();
  if (first) open();
  else show();
}

function sayLive() {
  const names = newest.processes.map((each) => each.process || "the service").join(", ");
  const missing = newest.missing.length ? `; no answer from ${newest.missing.join(", ")}` : "";
  say(connection, `Live: ${names}${missing}`, missing ? "warn" : "good");
}

// The service may be connected and still send nothing, for example if its disk hangs.
function sayStale() {
  const lost = newest === null || connection.classList.contains("lost");
  if (lost || performance.now() - heardMs < STALE_MS) return;
  say(connection, `No update since ${clock(newest.unix_ms)}, although the connection is open`, "bad");
  say(time, "");
}

function lose(error) {
  if (error instanceof Refused && (error.status === 401 || error.status === 403)) return lock(error);
  const why = error instanceof Refused ? error.message : "trying again";
  const since = newest ? `; showing the state of ${clock(newest.unix_ms)}` : "";
  say(connection, `Connection lost: ${why}${since}`, "bad lost");
  say(time, "");
}

// Starts over with a new token, and ignores answers to an earlier one.
function hear() {
  hearing.abort();
  hearing = new AbortController();
  hearAll(hold, lose, hearing.signal);
}

access.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", document.getElementById("token").value);
  document.getElementById("token").value = "";
  main.focus();
  hear();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // The address names the view, so it must not change.
  main.focus();
});
window.addEventListener("hashchange", () => {
  if (!access.hidden) return;
  open();
  main.focus();
});
setInterval(sayStale, 1000);
open();
hear();
