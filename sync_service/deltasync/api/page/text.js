// Numbers and times in readable form.

// Shown for an unknown number, instead of 0 or nothing.
export const UNKNOWN = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(number) {
  return number === null ? UNKNOWN : whole.format(number);
}

export function counted(number, noun) {
  return number === 1 ? `1 ${noun}` : `${count(number)} ${noun}s`;
}

export function bytes(number) {
  if (number === null) return UNKNOWN;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; number >= 1000 && at < units.length - 1; at++) number /= 1000;
  return `${at && number < 100 ? number.toFixed(1) : Math.round(number)} ${units[at]}`;
}

export function seconds(number) {
  if (number === null) return UNKNOWN;
  if (number === 0) return "0 s";
  if (number < 0.0995) return `${(1000 * number).toFixed(number < 0.00995 ? 1 : 0)} ms`;
  if (number < 120) return `${number.toFixed(number < 10 ? 2 : 0)} s`;
  if (number < 7200) return `${Math.round(number / 60)} min`;
  return number < 172_800 ? `${(number / 3600).toFixed(1)} h` : `${Math.round(number / 86_400)} days`;
}

export function percent(share) {
  if (share === null) return UNKNOWN;
  return `${share < 0.995 ? (100 * share).toPrecision(2) : count(100 * share)} %`;
}

export function norm(number) {
  return number === null ? UNKNOWN : number.toPrecision(3);
}

// A value in a table, by its unit.
export function shown(value, unit) {
  if (value === null) return UNKNOWN;
  if (unit === "bytes") return bytes(value);
  if (unit === "seconds") return seconds(value);
  if (unit === "share") return percent(value);
  if (typeof value === "boolean") return value ? "yes" : "";
  if (typeof value === "number") return Number.isInteger(value) ? count(value) : norm(value);
  return Array.isArray(value) ? value.join(", ") : value;
}

// The newest version of a model; 0 means that nothing has been published.
export function version(head) {
  return head ? `version ${count(head)}` : "no version yet";
}

// The time of day, with the date if it is not today.
export function clock(ms) {
  const at = new Date(ms);
  const time = at.toLocaleTimeString("en-GB");
  return at.toDateString() === new Date().toDateString() ? time : `${at.toLocaleDateString("en-CA")} ${time}`;
}

// States of consumers and of replicas.
const GOOD = new Set(["in sync", "current", "connected", "guest"]);
const FINE = new Set(["delivered", "behind", "partial", "empty", "waiting", "paused", "late", "rewound"]);
// "delivered" counts too: some replicas, such as stores, cannot verify their rows.
export const HOLDING = new Set(["in sync", "current", "delivered"]);

// A consumer can be in sync and still have a replica that needs attention, such as one that is away but lacks nothing.
export function mood(state, needed = false) {
  if (GOOD.has(state)) return needed ? "warn" : "good";
  return FINE.has(state) ? "warn" : "bad";
}

export function worst(moods) {
  return ["bad", "warn"].find((each) => moods.includes(each)) ?? "good";
}

const ORDER = ["failed", "damaged", "away", "waiting", "behind", "partial", "delivered", "paused", "empty", "current", "in sync"];

// An unlisted state comes first.
export function urgency(state, needed = false) {
  return Math.min(ORDER.indexOf(state), needed ? ORDER.indexOf("partial") : ORDER.length);
}
