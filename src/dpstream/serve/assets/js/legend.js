// The keys in the chart: colour, pattern, value with its margin, and a way out.
import { byId, make, reconcile, write } from "./dom.js";
import { changeText, figureText, moment } from "./format.js";
import { keyNode, keyText } from "./keys.js";
import { appeared } from "./chart_parts.js";
import { DASHES } from "./slots.js";

const SVG = "http://www.w3.org/2000/svg";

/** A short piece of the line, drawn as in the chart. */
function sample(slot) {
  const drawing = document.createElementNS(SVG, "svg");
  drawing.setAttribute("viewBox", "0 0 28 10");
  drawing.setAttribute("class", `sample s${slot + 1}`);
  drawing.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(SVG, "line");
  for (const [name, value] of Object.entries({
    x1: 1,
    x2: 27,
    y1: 5,
    y2: 5,
    "stroke-dasharray": DASHES[slot].join(" ") || "none",
  }))
    line.setAttribute(name, value);
  drawing.append(line);
  return drawing;
}

const valueAt = (line, time) => line.at.get(time);

/** A point's value with its margin, and how it has changed since the window before. */
export const pointText = ({ value, stddev, low, high, held, open, since }) =>
  [figureText({ value, stddev, low, high, held }), since ? `(${changeText(value, stddev, since)})` : "", open ? "so far" : ""]
    .filter(Boolean)
    .join(" ");

/** Fill the legend; `index` is the release under the cursor, or null for the newest. */
export function showLegend({ model, index, picked, onRemove, onOpen, onPoint, spoken }) {
  const time = model.times[index ?? model.times.length - 1];
  reconcile(byId("legend"), model.lines, {
    keyOf: (line) => `${line.id}/${line.slot}`,
    create: (line) => {
      const name = make(
        "button",
        { type: "button", class: "chip-name", title: "Show this key" },
        keyNode(line.row, 28),
      );
      name.addEventListener("click", () => onOpen(chip.row));
      const out = make(
        "button",
        { type: "button", class: "chip-out", "aria-label": `Take ${keyText(line.row, 40)} out of the chart` },
        "✕",
      );
      out.addEventListener("click", () => {
        onPoint(null); // a node that is gone is never left
        onRemove(line.id);
      });
      const chip = make(
        "li",
        { class: `chip s${line.slot + 1}` },
        sample(line.slot),
        name,
        make("span", { class: "chip-value" }),
        out,
      );
      for (const begins of ["pointerenter", "focusin"]) chip.addEventListener(begins, () => onPoint(line.slot));
      for (const ends of ["pointerleave", "focusout"]) chip.addEventListener(ends, () => onPoint(null));
      return chip;
    },
    update: (node, line) => {
      node.row = line.row;
      const point = valueAt(line, time);
      const value = node.querySelector(".chip-value");
      value.style.minWidth = `${line.widest}ch`; // wide enough for all values: the page does not move under the pointer
      write(value, point ? pointText(point) : line.list ? "" : "–");
      node.querySelector(".chip-out").hidden = picked === "only";
    },
  });
  byId("appear-note").hidden = !model.lines.some((line) => appeared(line, model.times));
  byId("readout").setAttribute("aria-live", spoken ? "polite" : "off"); // who moves by keyboard hears it
  write(byId("readout"), readout(model, index, time, spoken));
}

function readout(model, index, time, spoken) {
  if (time === undefined) return "";
  const when = moment(new Date(time * 1000).toISOString());
  if (index === null) return `Newest ${model.all ? "window: from" : "release:"} ${when} UTC`;
  const born = model.lines.filter((line) => appeared(line, model.times) && line.points[0].time === time);
  const news = born.length ? ` · appeared here: ${born.map((line) => keyText(line.row, 40)).join(", ")}` : "";
  const at = model.all ? "Window from" : "At";
  if (!spoken) return `${at} ${when} UTC${news}`;
  const values = model.lines.map((line) => {
    const point = valueAt(line, time);
    return `${keyText(line.row, 40)} ${point ? pointText(point) : "not there yet"}`;
  });
  return `${at} ${when} UTC${news}: ${values.join("; ")}`;
}

/** The chart as a table, for those who read numbers rather than lines. */
export function showTable(model) {
  if (!byId("as-table").open) return;
  const head = make(
    "tr",
    {},
    make("th", { scope: "col" }, model.all ? "Window from (UTC)" : "Time (UTC)"),
    model.lines.map((line) => make("th", { scope: "col" }, keyNode(line.row, 28))),
  );
  const rows = model.times
    .toReversed()
    .slice(0, 500)
    .map((time) =>
      make(
        "tr",
        {},
        make("th", { scope: "row" }, moment(new Date(time * 1000).toISOString())),
        model.lines.map((line) => {
          const point = valueAt(line, time);
          return make("td", {}, point ? pointText(point) : "");
        }),
      ),
    );
  byId("chart-table").replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, rows)));
}
