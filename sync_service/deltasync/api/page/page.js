// The page: hears the service, and shows what the address asks for.

import { say } from "./dom.js";
import { follow, getJson, Refused } from "./stream.js";
import { consumerView } from "./consumer.js";
import { overviewView } from "./overview.js";
import { tablesView, tableView } from "./tables.js";

const main = document.getElementById("main");
const connection = document.getElementById("connection");
const access = document.getElementById("access");
const AGAIN_MS = 2000;
let view = null;
let newest = null;
let asking = false;

function viewOf(hash) {
  const [, kind, ...names] = hash.replace(/^#/, "").split("/").map(decodeURIComponent);
  if (kind === "consumers" && names[0]) return consumerView(names[0]);
  if (kind === "tables" && names[0]) return tableView(names[0]);
  if (kind === "tables") return tablesView();
  return overviewView();
}

function open() {
  view = viewOf(location.hash);
  document.title = view.title === "deltasync" ? view.title : `${view.title} - deltasync`;
  main.replaceChildren(...view.elements);
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === (location.hash || "#/")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (newest) show();
}

function show() {
  Promise.resolve(view.show(newest)).catch((error) => refuse(error));
}

function refuse(error) {
  if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
    access.hidden = false;
    say(document.getElementById("refusal"), error.message);
    say(connection, "The service shows nothing without a token", "bad");
    newest = null;
    main.replaceChildren();
    return true;
  }
  if (error instanceof Refused) say(connection, error.message, "bad");
  return false;
}

function hold(status) {
  const first = newest === null;
  newest = status;
  access.hidden = true;
  const names = status.processes.map((each) => each.process || "the service").join(", ");
  const missing = status.missing.length ? `; nothing of ${status.missing.join(", ")}` : "";
  say(connection, `Live: ${names}, ${new Date(status.unix_ms).toLocaleTimeString("en-GB")}${missing}`, missing ? "warn" : "good");
  if (first) open();
  else show();
}

// A stream has what its process has; of several, the whole is asked for as often.
async function hearPart(status) {
  if (!status.missing.length) return hold(status);
  if (asking) return;
  asking = true;
  try {
    hold(await getJson("/status").catch(() => status));
  } finally {
    asking = false;
  }
}

async function hear() {
  for (;;) {
    try {
      await follow("/status", hearPart);
    } catch (error) {
      if (refuse(error)) return;
      const since = newest ? `; what is shown is of ${new Date(newest.unix_ms).toLocaleTimeString("en-GB")}` : "";
      say(connection, `Connection lost: trying again${since}`, "bad");
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

access.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", document.getElementById("token").value);
  document.getElementById("token").value = "";
  hear();
});
window.addEventListener("hashchange", () => {
  if (location.hash !== "#main" && access.hidden) open();
});
open();
hear();
