// Numbers and times, as people read them.

// Stands where a number is not known: neither 0 nor nothing.
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

// Since when the oldest row waits that a table's last release left. Without releases that is not known, though 0.
export function oldestRow({ rows, oldest_row_seconds, unsent_norm }) {
  return rows && unsent_norm === null ? UNKNOWN : seconds(oldest_row_seconds);
}

// The newest version of a model: 0 is that of one of which nothing is published.
export function version(head) {
  return head ? `version ${count(head)}` : "no version yet";
}

// The time of day, and the day where that is another than today.
export function clock(ms) {
  const at = new Date(ms);
  const time = at.toLocaleTimeString("en-GB");
  return at.toDateString() === new Date().toDateString() ? time : `${at.toLocaleDateString("en-CA")} ${time}`;
}

// States of consumers and of replicas.
const GOOD = new Set(["in sync", "current", "connected", "guest"]);
const FINE = new Set(["delivered", "behind", "partial", "empty", "waiting", "paused", "late", "rewound"]);
// Replicas that cannot show what they hold, such as a store, have all of it as far as anybody knows.
export const HOLDING = new Set(["in sync", "current", "delivered"]);

// A consumer can be in sync although it has a replica that needs somebody: one that is away and lacks nothing.
export function mood(state, needed = false) {
  if (GOOD.has(state)) return needed ? "warn" : "good";
  return FINE.has(state) ? "warn" : "bad";
}

export function worst(moods) {
  return ["bad", "warn"].find((each) => moods.includes(each)) ?? "good";
}

const ORDER = ["failed", "damaged", "away", "waiting", "behind", "partial", "delivered", "paused", "empty", "current", "in sync"];

// A state that is not listed comes first.
export function urgency(state, needed = false) {
  return Math.min(ORDER.indexOf(state), needed ? ORDER.indexOf("partial") : ORDER.length);
}
