// Numbers and times, as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(number) {
  return number === null ? "" : whole.format(number);
}

export function counted(number, noun) {
  return number === 1 ? `1 ${noun}` : `${count(number)} ${noun}s`;
}

export function bytes(number) {
  if (number === null) return "";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; number >= 1000 && at < units.length - 1; at++) number /= 1000;
  return `${at && number < 100 ? number.toFixed(1) : Math.round(number)} ${units[at]}`;
}

export function seconds(number) {
  if (number === null || number === undefined) return "";
  if (number === 0) return "0 s";
  if (number < 0.0995) return `${(1000 * number).toFixed(number < 0.00995 ? 1 : 0)} ms`;
  if (number < 120) return `${number.toFixed(number < 10 ? 2 : 0)} s`;
  if (number < 7200) return `${Math.round(number / 60)} min`;
  return number < 172_800 ? `${(number / 3600).toFixed(1)} h` : `${Math.round(number / 86_400)} days`;
}

export function percent(share) {
  return share === null || share === undefined ? "" : `${(100 * share).toPrecision(2)} %`;
}

export function norm(number) {
  return number === null || number === undefined ? "" : number.toPrecision(3);
}

// The time of day, and the day where that is another than today.
export function clock(ms) {
  const at = new Date(ms);
  const time = at.toLocaleTimeString("en-GB");
  return at.toDateString() === new Date().toDateString() ? time : `${at.toLocaleDateString("en-CA")} ${time}`;
}

const GOOD = new Set(["in sync", "current"]);
const FINE = new Set(["delivered", "behind", "partial", "empty", "waiting", "paused"]);
// Replicas that cannot show what they hold, a store say, have all of it so far as anybody knows.
export const HOLDING = new Set([...GOOD, "delivered"]);

export function mood(state) {
  return GOOD.has(state) ? "good" : FINE.has(state) ? "warn" : "bad";
}

export function worst(moods) {
  return ["bad", "warn"].find((each) => moods.includes(each)) ?? "good";
}

const ORDER = ["failed", "damaged", "away", "waiting", "behind", "partial", "delivered", "paused", "empty", "current", "in sync"];

export function urgency(state) {
  const at = ORDER.indexOf(state);
  return at < 0 ? -1 : at;
}
