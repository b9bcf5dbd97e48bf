// Values over time with their bands. One plot is made once and only its data change: no flicker.
import uPlot from "../vendor/uplot/uPlot.esm.js";
import { BAND } from "./format.js";
import { drawMarks, timeLabels, valueLabels, xRange, yRange } from "./chart_parts.js";
import { DASHES } from "./slots.js";
import { colour } from "./theme.js";
import { MOST_PICKED } from "./view.js";

const HEIGHT = { wide: 340, narrow: 260 };
const MANY_POINTS = 80;

export class Chart {
  /** `onCursor(index, model)` is called with the release under the cursor, or null. */
  constructor(box, onCursor) {
    this.box = box;
    this.onCursor = onCursor;
    this.model = null;
    this.plot = null;
    this.colours = {};
    this.emphasis = null;
    new ResizeObserver(() => this.#fit()).observe(box);
    box.addEventListener("keydown", (event) => this.#key(event));
    box.addEventListener("blur", () => this.#point(null));
  }

  /** Show `lines` = [{slot, firstSeen, points: [{time, value, stddev, releaseIndex, window}]}] from start to end. */
  show({ lines, start, end }) {
    const times = [...new Set(lines.flatMap((line) => line.points.map((point) => point.time)))].sort((a, b) => a - b);
    const place = new Map(times.map((time, index) => [time, index]));
    const data = [times, ...Array.from({ length: 3 * MOST_PICKED }, () => new Array(times.length).fill(null))];
    for (const { slot, points } of lines) {
      for (const { time, value, stddev } of points) {
        const [index, first] = [place.get(time), 1 + 3 * slot];
        data[first][index] = value;
        if (value === null || !(stddev >= 0)) continue;
        data[first + 1][index] = value - BAND * stddev;
        data[first + 2][index] = value + BAND * stddev;
      }
    }
    this.model = { lines, start, end, times, data };
    if (!this.plot) this.#make();
    this.plot.setData(data);
    this.onCursor(this.plot.cursor.idx ?? null, this.model, false);
  }

  /** Let one line stand out, or none (null): the others fade and lose their bands. */
  emphasise(slot) {
    if (this.emphasis === slot) return;
    this.emphasis = slot;
    this.plot?.redraw(false);
  }

  #stroke(slot) {
    const whole = this.colours.lines[slot];
    return this.emphasis === null || this.emphasis === slot ? whole : faded(whole, 0.3);
  }

  #band(slot) {
    if (this.emphasis !== null && this.emphasis !== slot) return "transparent";
    return faded(this.colours.lines[slot], this.emphasis === slot ? 0.3 : 0.16);
  }

  /** Take up changed colours. */
  recolour() {
    this.#readColours();
    this.plot?.redraw(false);
  }

  #readColours() {
    this.colours = {
      text: colour("quiet"),
      grid: colour("line"),
      surface: colour("surface"),
      lines: Array.from({ length: MOST_PICKED }, (_, slot) => colour(`s${slot + 1}`)),
    };
  }

  #size() {
    const width = Math.max(240, this.box.clientWidth);
    return { width, height: width < 520 ? HEIGHT.narrow : HEIGHT.wide };
  }

  #fit() {
    const size = this.#size();
    if (this.plot && (this.plot.width !== size.width || this.plot.height !== size.height)) this.plot.setSize(size);
  }

  #make() {
    this.#readColours();
    const series = [{}];
    const bands = [];
    for (let slot = 0; slot < MOST_PICKED; slot += 1) {
      const stroke = () => this.#stroke(slot);
      const edge = { stroke: () => "transparent", points: { show: false }, spanGaps: false };
      series.push(
        {
          stroke,
          width: 2,
          dash: DASHES[slot],
          points: { show: () => this.model.times.length <= MANY_POINTS, size: 5, fill: stroke },
        },
        { ...edge },
        { ...edge },
      );
      bands.push({ series: [3 * slot + 3, 3 * slot + 2], fill: () => this.#band(slot) });
    }
    const axis = {
      stroke: () => this.colours.text,
      font: "12px Inter, system-ui, sans-serif",
      grid: { stroke: () => this.colours.grid, width: 1 },
      ticks: { show: false },
    };
    this.plot = new uPlot(
      {
        ...this.#size(),
        series,
        bands,
        legend: { show: false },
        padding: [14, 22, 0, 0],
        cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
        tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
        scales: { x: { range: () => xRange(this.model) }, y: { range: () => yRange(this.model) } },
        axes: [
          { ...axis, grid: { show: false }, values: timeLabels, space: 64 },
          { ...axis, values: valueLabels, size: 56 },
        ],
        hooks: {
          draw: [(plot) => drawMarks(plot, this.model, this.colours)],
          setCursor: [(plot) => this.model && this.onCursor(plot.cursor.idx ?? null, this.model, false)],
        },
      },
      [[], ...Array.from({ length: 3 * MOST_PICKED }, () => [])],
      this.box,
    );
  }

  #point(index) {
    if (!this.plot) return;
    const left = index === null ? -10 : this.plot.valToPos(this.model.times[index], "x");
    this.plot.setCursor({ left, top: index === null ? -10 : 10 });
    this.onCursor(index, this.model, index !== null);
  }

  #key(event) {
    const last = (this.model?.times.length ?? 0) - 1;
    if (last < 0) return;
    const at = this.plot.cursor.idx;
    const moves = {
      ArrowLeft: at === null || at === undefined ? last : Math.max(0, at - 1),
      ArrowRight: Math.min(last, (at ?? last) + 1),
      Home: 0,
      End: last,
      Escape: null,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.#point(moves[event.key]);
  }
}

const faded = (rgb, alpha) => rgb.replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);
