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

/** One column of a row or point: its value, and what is published beside it. */
export function figure(row, name) {
  const of = (kind) => row[kind]?.[name] ?? null;
  return { value: of("values"), stddev: of("stddev"), low: of("low"), high: of("high") };
}

/** From where to where the true value is: by its noise, or, where that is not told, the published interval; else null. */
export function ends({ value, stddev, low, high }) {
  if (value === null || value === undefined) return null;
  if (stddev >= 0 && stddev !== null && stddev !== undefined) return [value - BAND * stddev, value + BAND * stddev];
  return low === null || high === null || low === undefined || high === undefined ? null : [low, high];
}

/** How exact a figure is: "± 22", or "(0.31 to 0.47)" where only an interval is published. */
export function exactness(one) {
  const found = ends(one);
  if (!found || (one.stddev >= 0 && one.stddev !== null)) return margin(one.stddev ?? null);
  const error = (found[1] - found[0]) / 2;
  return `(${number(found[0], error)} to ${number(found[1], error)})`;
}

/** The interval that is published beside a margin, which may be wider to one side; empty if there is none. */
export function published({ stddev, low, high }) {
  if (!(stddev >= 0) || stddev === null || low === null || high === null) return "";
  return `${number(low, (high - low) / 2)} to ${number(high, (high - low) / 2)}`;
}

/** The value alone, rounded to what its error lets one know. */
export function valueText(one) {
  const found = ends(one);
  return number(one.value, found ? (found[1] - found[0]) / 2 : 0);
}

/** A value with its margin or interval, and whether it repeats an older one. */
export const figureText = (one) => `${valueText(one)} ${exactness(one)}${one.held ? " held" : ""}`.trim();

/** A value with its margin. */
export const withMargin = (value, stddev, held = false) => figureText({ value, stddev, held });
