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

/** The decimal place that is worth showing next to an error of this size: the second digit of it. Tens are -1. */
function place(error) {
  const first = Math.floor(Math.log10(error));
  const carried = Math.ceil(Number((error / 10 ** (first - 1)).toFixed(6))) >= 100; // 99.6 is shown as 100
  return Math.min(6, 1 - first - (carried ? 1 : 0));
}

function rounded(value, digits, round = Math.round) {
  const unit = 10 ** -digits;
  return formatter(Math.max(0, digits)).format(round(Number((value / unit).toFixed(6))) * unit + 0); // no -0
}

/** A value, rounded to what its error lets one know; files and feed have all digits. */
export function number(value, error) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (error > 0) return rounded(value, place(error));
  return rounded(value, Number.isInteger(value) || !value ? 0 : Math.max(0, place(Math.abs(value) / 100)));
}

/** The half width of the band, as text: two digits of it, rounded up. */
export function margin(stddev) {
  if (stddev === null || !(stddev >= 0)) return "";
  const width = BAND * stddev;
  return `± ${width > 0 ? rounded(width, place(width), Math.ceil) : number(width)}`;
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

/** How far a value is from an earlier one, whose noise is its own: the margins add up in squares. */
export function changeText(value, stddev, { value: before, stddev: then }) {
  if (value === null || before === null) return "–";
  const spread = stddev >= 0 && then >= 0 && stddev !== null && then !== null ? Math.hypot(stddev, then) : null;
  const text = withMargin(value - before, spread);
  return value - before > 0 && !text.startsWith("0") ? `+${text}` : text;
}

/** A value with its margin, and whether it repeats an older one. */
export const withMargin = (value, stddev, held = false) =>
  `${number(value, BAND * stddev)} ${margin(stddev)}${held ? " held" : ""}`.trim();
