// Values over time with their bands. One plot is made once and only its data change: no flicker.
import uPlot from "../vendor/uplot/uPlot.esm.js";
import { ends } from "./format.js";
import { drawMarks, timeLabels, valueLabels, xRange, yRange } from "./chart_parts.js";
import { DASHES } from "./slots.js";
import { colour } from "./theme.js";
import { MOST_PICKED } from "./view.js";

const HEIGHT = { wide: 340, narrow: 260 };
const MANY_POINTS = 80;
const EDGES = 3; // columns of a line: its values, and both ends of its band
const COLUMNS = (EDGES + 1) * MOST_PICKED; // and the window before
const ZOOM = 2;

export class Chart {
  /**
   * `onCursor(index, model)` is called with the release under the cursor, or null; `onZoom(range)` when
   * another part of the time is chosen: two moments, or null for all of it.
   */
  constructor(box, onCursor, onZoom) {
    this.box = box;
    this.onCursor = onCursor;
    this.onZoom = onZoom;
    this.model = null;
    this.plot = null;
    this.colours = {};
    this.emphasis = null;
    new ResizeObserver(() => this.#fit()).observe(box);
    box.addEventListener("keydown", (event) => this.#key(event));
    box.addEventListener("blur", () => this.#point(null));
  }

  /**
   * Show `lines` = [{slot, points: [{time, value, stddev, open}], before: [points]}] from start to end.
   * `before` is the window before, moved to the times of this one; `all`: a point for each window.
   */
  show({ lines, start, end, zoom = null, log = false, all = false }) {
    const every = lines.flatMap((line) => [...line.points, ...(line.before ?? [])]);
    const times = [...new Set(every.map((point) => point.time))].sort((a, b) => a - b);
    const place = new Map(times.map((time, index) => [time, index]));
    const data = [times, ...Array.from({ length: COLUMNS }, () => new Array(times.length).fill(null))];
    // A logarithm has no place for 0 and below: such values are left out, bands end at the bottom.
    const drawn = (value) => (value === null || (log && value <= 0) ? null : value);
    const bottom = Math.min(...every.map((point) => drawn(point.value) ?? Infinity)) / 2;
    for (const { slot, points, before } of lines) {
      for (const point of points) {
        const { time, value } = point;
        const [index, first] = [place.get(time), 1 + EDGES * slot];
        data[first][index] = drawn(value);
        const around = drawn(value) === null ? null : ends(point);
        if (!around) continue;
        data[first + 1][index] = log ? Math.max(bottom, around[0]) : around[0];
        data[first + 2][index] = around[1];
      }
      for (const { time, value } of before ?? [])
        data[1 + EDGES * MOST_PICKED + slot][place.get(time)] = drawn(value);
    }
    const other = this.model && this.model.log !== log;
    this.model = { lines, start, end, times, data, zoom, log, all };
    if (other) {
      this.plot.destroy();
      this.plot = null;
    }
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

  /** Look at half of what is seen, around its middle; at twice as much; or a half of it further on. */
  zoomBy(factor, shift = 0) {
    const [from, to] = this.plot ? xRange(this.model) : [0, 0];
    const [first, last] = xRange({ ...this.model, zoom: null });
    const width = Math.min((to - from) * factor, last - first);
    const middle = (from + to) / 2 + shift * (to - from);
    const start = Math.min(Math.max(middle - width / 2, first), last - width);
    if (this.model.times.length > 1) this.onZoom(width >= last - first ? null : [start, start + width]);
  }

  /** The window that goes on is not joined to those that have ended. */
  #gaps(slot, between) {
    const line = this.model.lines.find((one) => one.slot === slot);
    const place = line?.points.findIndex((point) => point.open) ?? -1;
    if (place < 1) return between;
    const ends = [line.points[place - 1], line.points[place]].map(({ time }) => this.plot.valToPos(time, "x", true));
    return [...between, ends];
  }

  #selected(plot) {
    const { left, width } = plot.select;
    if (width > 4) this.onZoom([left, left + width].map((place) => plot.posToVal(place, "x")));
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
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
      const gaps = (_plot, _series, _from, _to, between) => this.#gaps(slot, between);
      const edge = { stroke: () => "transparent", points: { show: false }, spanGaps: false, gaps };
      series.push(
        {
          stroke,
          width: 2,
          gaps,
          dash: DASHES[slot],
          points: { show: () => this.model.times.length <= MANY_POINTS, size: 5, fill: stroke },
        },
        { ...edge },
        { ...edge },
      );
      bands.push({ series: [EDGES * slot + 3, EDGES * slot + 2], fill: () => this.#band(slot) });
    }
    for (let slot = 0; slot < MOST_PICKED; slot += 1)
      series.push({ stroke: () => faded(this.#stroke(slot), 0.45), width: 1, points: { show: false }, spanGaps: true });
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
        cursor: { y: false, drag: { x: true, y: false, setScale: false }, points: { show: false } },
        tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
        scales: {
          x: { range: () => xRange(this.model) },
          y: { range: () => yRange(this.model), distr: this.model.log ? 3 : 1 },
        },
        axes: [
          { ...axis, grid: { show: false }, values: timeLabels, space: 64 },
          { ...axis, values: valueLabels, size: 56 },
        ],
        hooks: {
          draw: [(plot) => drawMarks(plot, this.model, this.colours)],
          setSelect: [(plot) => this.#selected(plot)],
          setCursor: [(plot) => this.model && this.onCursor(plot.cursor.idx ?? null, this.model, false)],
        },
      },
      [[], ...Array.from({ length: COLUMNS }, () => [])],
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
    const zooms = { "+": [1 / ZOOM, 0], "-": [ZOOM, 0], "<": [1, -0.5], ">": [1, 0.5] };
    if (event.key in zooms) return this.zoomBy(...zooms[event.key]);
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
