// Ranges, labels and marks of the chart.
import { ends } from "./format.js";

/** Show the whole window once three quarters of it are there; before, leave a quarter free for what comes. */
export function xRange({ times, start, end, zoom }) {
  if (zoom) return zoom;
  if (!times.length) return start && end ? [start, end] : [0, 1];
  const [first, last] = [start ?? times[0], times[times.length - 1]];
  const room = last > first ? (last - first) / 3 : 1800;
  const until = end === null || end === undefined ? last : Math.min(end, last + room);
  const lone = times.length === 1 && until <= first ? 1800 : 0;
  return [first - lone, Math.max(until, last) + lone];
}

/** From zero, unless all values lie far from it; of what can be seen. A log scale takes whole powers of ten. */
export function yRange({ times, data, zoom, log }) {
  let [low, high] = [Infinity, -Infinity];
  // A line that leaves the picture goes on to the point behind its edge.
  const after = zoom ? times.findIndex((time) => time > zoom[1]) : -1;
  const [from, to] = zoom ? [times.findLastIndex((time) => time < zoom[0]), after < 0 ? Infinity : after] : [0, Infinity];
  for (const column of data.slice(1)) {
    column.forEach((value, index) => {
      if (value === null || index < from || index > to) return;
      if (value < low) low = value;
      if (value > high) high = value;
    });
  }
  if (low > high) return log ? [1, 10] : [0, 1];
  if (log) {
    const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    return [10 ** from, 10 ** Math.max(to, from + 1)];
  }
  const far = low > 0.5 * high;
  const air = (high - (far ? low : Math.min(0, low))) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [far ? low - air : Math.min(0, low < 0 ? low - air : 0), high + air];
}

const utc = (options) => new Intl.DateTimeFormat("en-GB", { timeZone: "UTC", ...options });
const day = utc({ day: "numeric", month: "short" });
const month = utc({ month: "short", year: "numeric" });
const clock = utc({ hour: "2-digit", minute: "2-digit" });
const seconds = utc({ hour: "2-digit", minute: "2-digit", second: "2-digit" });

/** Times of day, with the date where it changes. */
export function timeLabels(_plot, splits, _axis, _space, step) {
  let before = "";
  return splits.map((at) => {
    const date = new Date(at * 1000);
    if (step >= 28 * 86_400) return month.format(date);
    if (step >= 86_400) return day.format(date);
    const time = step < 60 ? seconds.format(date) : clock.format(date);
    const today = day.format(date);
    const label = today === before ? time : `${time}\n${today}`;
    before = today;
    return label;
  });
}

const plain = new Intl.NumberFormat("en", { maximumSignificantDigits: 6 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });

export const valueLabels = (_plot, splits) =>
  splits.map((value) => (value === null ? "" : (Math.abs(value) >= 10_000 ? compact : plain).format(value)));

/** Was a key not there before its first point? The first release of all says nothing about that. */
export function appeared(line, times) {
  return line.points.length > 0 && (line.late ?? line.points[0].time > times[0]);
}

/** What the lines leave out: a diamond with a foot where a key appeared, an error bar where one point is all. */
export function drawMarks(plot, model, colours) {
  if (!model) return;
  const { ctx } = plot;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(plot.bbox.left - 6 * ratio, plot.bbox.top - 6 * ratio, plot.bbox.width + 12 * ratio, plot.bbox.height + 12 * ratio);
  ctx.clip();
  for (const line of model.lines) {
    if (line.points.length === 1) drawBar(plot, line.points[0], colours.lines[line.slot]);
    for (const point of line.points) if (point.open) drawOpen(plot, point, colours.lines[line.slot], colours.surface);
  }
  for (const line of model.lines) {
    if (!appeared(line, model.times)) continue;
    const { time, value } = line.points[0];
    if (value === null || (model.log && value <= 0)) continue;
    const [x, y] = [plot.valToPos(time, "x", true), plot.valToPos(value, "y", true)];
    const half = 6 * ratio;
    ctx.strokeStyle = ctx.fillStyle = colours.lines[line.slot];
    ctx.lineWidth = ratio;
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(x, y);
    ctx.lineTo(x, plot.bbox.top + plot.bbox.height);
    ctx.stroke();
    ctx.setLineDash([]);
    ctx.beginPath();
    ctx.moveTo(x, y - half);
    ctx.lineTo(x + half, y);
    ctx.lineTo(x, y + half);
    ctx.lineTo(x - half, y);
    ctx.closePath();
    ctx.fill();
    ctx.lineWidth = 1.25 * ratio;
    ctx.strokeStyle = colours.surface;
    ctx.stroke();
  }
  ctx.restore();
}

/** A window that goes on stands apart, as an empty circle: it is no fall, it has not ended. */
function drawOpen(plot, { time, value }, colour, surface) {
  if (value === null || (plot.scales.y.distr === 3 && value <= 0)) return;
  const { ctx } = plot;
  ctx.strokeStyle = colour;
  ctx.fillStyle = surface;
  ctx.lineWidth = 2 * devicePixelRatio;
  ctx.beginPath();
  ctx.arc(plot.valToPos(time, "x", true), plot.valToPos(value, "y", true), 4.5 * devicePixelRatio, 0, 2 * Math.PI);
  ctx.fill();
  ctx.stroke();
}

function drawBar(plot, point, colour) {
  const around = ends(point);
  if (!around || around[0] === around[1] || plot.scales.y.distr === 3) return;
  const { time } = point;
  const { ctx } = plot;
  const [x, half] = [plot.valToPos(time, "x", true), 5 * devicePixelRatio];
  const [low, high] = around.map((end) => plot.valToPos(end, "y", true));
  ctx.strokeStyle = colour;
  ctx.lineWidth = 2 * devicePixelRatio;
  ctx.beginPath();
  for (const y of [low, high]) {
    ctx.moveTo(x - half, y);
    ctx.lineTo(x + half, y);
  }
  ctx.moveTo(x, low);
  ctx.lineTo(x, high);
  ctx.stroke();
}
