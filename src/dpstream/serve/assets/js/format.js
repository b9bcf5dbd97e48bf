// Numbers and times as people read them.

/** Half the width of a band, in standard deviations: about 19 of 20 values lie within it. */
export const BAND = 2;

const grouped = new Map();

function formatter(digits) {
  if (!grouped.has(digits)) {
    grouped.set(digits, new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  }
  return grouped.get(digits);
}

/** How many decimals are worth showing next to an error of this size: two significant ones of it. */
function decimals(error) {
  if (!(error > 0)) return 0;
  return Math.min(6, Math.max(0, 1 - Math.floor(Math.log10(error))));
}

/** A value, rounded to what its error lets one know. */
export function number(value, error) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const digits = Number.isInteger(value) ? 0 : decimals(error > 0 ? error : Math.abs(value) / 100);
  return formatter(digits).format(value);
}

/** The half width of the band, as text. */
export function margin(stddev) {
  if (!(stddev >= 0)) return "";
  return `± ${number(BAND * stddev, BAND * stddev)}`;
}

const raised = (power) => String(power).replace(/[-\d]/g, (sign) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(sign)]);

/** A small or large parameter such as epsilon or delta. */
export function parameter(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0 || (size >= 1e-3 && size < 1e6)) return String(Number(value.toPrecision(4)));
  const [digits, power] = value.toExponential(1).split("e");
  const factor = Number(digits);
  return `${factor === 1 ? "" : `${factor} × `}10${raised(Number(power))}`;
}

export function percent(part) {
  if (!(part > 0)) return "0%";
  if (part < 0.001) return "< 0.1%";
  return `${formatter(part < 0.1 ? 1 : 0).format(part * 100)}%`;
}

export function count(many, word, words = `${word}s`) {
  return `${formatter(0).format(many)} ${many === 1 ? word : words}`;
}

const parts = (options) => new Intl.DateTimeFormat("en-GB", { timeZone: "UTC", ...options });
const dayParts = parts({ day: "numeric", month: "short", year: "numeric" });
const shortDay = parts({ day: "numeric", month: "short" });
const clock = parts({ hour: "2-digit", minute: "2-digit" });
const fine = parts({ hour: "2-digit", minute: "2-digit", second: "2-digit" });

function timeOfDay(date) {
  return (date.getUTCSeconds() ? fine : clock).format(date);
}

const atMidnight = (date) => date.getTime() % 86_400_000 === 0;

/** A moment, such as "1 May 2024, 07:00"; all times are UTC. */
export function moment(text) {
  if (!text) return "–";
  const date = new Date(text);
  return `${dayParts.format(date)}, ${timeOfDay(date)}`;
}

/** A window from start to end, as short as it can be said. */
export function span(start, end) {
  if (!start && !end) return "all time";
  if (!end) return `since ${moment(start)}`;
  const [from, to] = [new Date(start), new Date(end)];
  if (atMidnight(from) && atMidnight(to)) {
    const last = new Date(to.getTime() - 1);
    const same = dayParts.format(from) === dayParts.format(last);
    return same ? dayParts.format(from) : `${shortDay.format(from)} – ${dayParts.format(last)}`;
  }
  const within = to.getTime() - Math.floor(from.getTime() / 86_400_000) * 86_400_000;
  if (within === 86_400_000) return `${dayParts.format(from)}, ${timeOfDay(from)}–24:00`;
  if (within < 86_400_000) return `${dayParts.format(from)}, ${timeOfDay(from)}–${timeOfDay(to)}`;
  return `${moment(start)} – ${moment(end)}`;
}

/** Words in a row: "a", "a and b", "a, b and c". */
export function listed(words) {
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}

/** A value with its margin, and whether it repeats an older one. */
export const withMargin = (value, stddev, held = false) =>
  `${number(value, BAND * stddev)} ${margin(stddev)}${held ? " held" : ""}`.trim();
