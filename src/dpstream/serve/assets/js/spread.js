// How the values of keys are spread: bins as bars, quantiles as marks on one line. Both with their margins.
import { byId, make, reconcile, write } from "./dom.js";
import { BAND, number, percent, withMargin } from "./format.js";
import { keyNode, keyText } from "./keys.js";

const MOST_LABELS = 9; // under the bars: more would touch

/** What a quantile is called. */
export const shareName = (share) =>
  share === 0.5 ? "median" : share === 0 ? "smallest" : share === 1 ? "largest" : `${percent(share)} quantile`;

/** What a number of the query is called: of a list of quantiles the middle one stands for it. */
export const measureName = ({ name, list }) =>
  list?.kind === "quantiles" ? `${name}, ${shareName(list.shares[list.middle])}` : name;

/** The parts of a list, as people say them. */
export const partNames = (list) =>
  list.kind === "quantiles"
    ? list.shares.map(shareName)
    : list.edges.slice(0, -1).map((edge, place) => `${number(edge)} to ${number(list.edges[place + 1])}`);

const isBins = (list) => list?.kind === "histogram";
const marginsOf = ({ values, stddev }) => values.map((value, place) => BAND * (stddev?.[place] ?? 0));

/** The least and the largest end of some lists, margins included. */
function ends(lists) {
  let [low, high] = [Infinity, -Infinity];
  for (const one of lists) {
    const margins = marginsOf(one);
    one.values.forEach((value, place) => {
      if (value === null) return;
      low = Math.min(low, value - margins[place]);
      high = Math.max(high, value + margins[place]);
    });
  }
  return low > high ? [0, 1] : [low, high];
}

/** Show the newest lists of the keys in the chart; `lines` = [{id, row, slot, list: {values, stddev}}]. */
export function showSpread({ aggregate, lines }) {
  const { list } = aggregate;
  const known = lines.filter((line) => line.list?.values);
  byId("spread").hidden = !list || !known.length;
  if (byId("spread").hidden) return;
  const [low, high] = ends(known.map((line) => line.list));
  const scale = isBins(list) ? [Math.min(0, low), Math.max(high, 0)] : [low, high];
  reconcile(byId("spread-keys"), known, {
    keyOf: (line) => `${aggregate.name}/${line.id}/${line.slot}`,
    create: (line) => (isBins(list) ? binsOf(line, list) : marksOf(line, list)),
    update: (node, line) => (isBins(list) ? updateBins : updateMarks)(node, line, list, scale),
  });
  byId("spread-keys").className = isBins(list) ? "spread-keys panels" : "spread-keys";
  byId("spread-axis").hidden = isBins(list);
  byId("spread-axis").replaceChildren(...scale.map((end) => make("span", {}, number(end, scale[1] - scale[0]))));
  write(byId("spread-note"), note(list));
  showNumbers(list, known);
}

function note(list) {
  if (isBins(list))
    return "One bar for each part of the range, as wide as the others whatever its part; all keys have one scale. What lies outside is in the outermost parts. The whisker of a bar is its band.";
  const names = list.shares.map(shareName);
  return `One mark each: ${names.join(", ")}. The thick mark is the ${names[list.middle]}; each has its band around it.`;
}

function binsOf(line, list) {
  const bars = list.edges.slice(1).map(() => make("span", { class: "bin" }, make("i", { class: "fill" }), make("i", { class: "whisker" })));
  const step = Math.ceil(list.edges.length / MOST_LABELS);
  const edges = list.edges.map((edge, place) => {
    const shown = place % step === 0 || place === list.edges.length - 1;
    const node = shown ? make("span", {}, number(edge)) : null;
    node?.style.setProperty("--at", `${(100 * place) / (list.edges.length - 1)}%`);
    return node;
  });
  return make(
    "li",
    { class: `panel s${line.slot + 1}` },
    make("h3", {}, keyNode(line.row, 28), make("span", { class: "quiet top-of" })),
    make("div", { class: "bins", role: "img" }, bars),
    make("div", { class: "edges quiet", "aria-hidden": "true" }, edges),
  );
}

function updateBins(node, line, list, [low, high]) {
  const picture = node.querySelector(".bins");
  placeBars(picture, line.list, [low, high]);
  write(node.querySelector(".top-of"), ` up to ${number(high, high)}`);
  picture.setAttribute("aria-label", spoken(line, list));
  const names = partNames(list);
  [...picture.children].forEach((bar, place) => {
    bar.title = `${names[place]}: ${withMargin(line.list.values[place], line.list.stddev?.[place] ?? null)}`;
  });
}

/** Heights of bars, in per cent of what lies between two numbers. */
function placeBars(picture, { values, stddev }, [low, high]) {
  const at = (value) => `${(100 * (value - low)) / (high - low || 1)}%`;
  const margins = marginsOf({ values, stddev });
  [...picture.children].forEach(({ style }, place) => {
    const value = values[place] ?? 0;
    style.setProperty("--from", at(Math.min(0, value)));
    style.setProperty("--to", at(Math.max(0, value)));
    style.setProperty("--low", at(Math.max(low, value - margins[place])));
    style.setProperty("--high", at(value + margins[place]));
  });
}

/** The bars of one key, small, for the list of keys. */
export function strip(node, found) {
  node.hidden = !found?.values;
  if (node.hidden) return;
  while (node.children.length > found.values.length) node.lastElementChild.remove();
  while (node.children.length < found.values.length) node.append(make("span", { class: "bin" }, make("i", { class: "fill" })));
  const [low, high] = ends([{ values: found.values }]);
  placeBars(node, found, [Math.min(0, low), Math.max(0, high)]);
}

function marksOf(line, list) {
  const marks = list.shares.map((_, place) =>
    make("span", { class: place === list.middle ? "mark middle" : "mark" }),
  );
  const bands = list.shares.map(() => make("i", { class: "whisker" }));
  const track = make("div", { class: "marks", role: "img" }, make("i", { class: "reach" }), bands, marks);
  return make("li", { class: `spread-row s${line.slot + 1}` }, keyNode(line.row, 28), track);
}

function updateMarks(node, line, list, [low, high]) {
  const at = (value) => `${(100 * (value - low)) / (high - low || 1)}%`;
  const { values } = line.list;
  const margins = marginsOf(line.list);
  const known = values.filter((value) => value !== null);
  const track = node.querySelector(".marks");
  track.style.setProperty("--from", at(Math.min(...known)));
  track.style.setProperty("--to", at(Math.max(...known)));
  track.setAttribute("aria-label", spoken(line, list));
  const names = partNames(list);
  const bands = track.querySelectorAll(".whisker");
  track.querySelectorAll(".mark").forEach((mark, place) => {
    const value = values[place];
    mark.hidden = bands[place].hidden = value === null;
    mark.title = `${names[place]}: ${withMargin(value, line.list.stddev?.[place] ?? null)}`;
    mark.style.setProperty("--at", at(value ?? 0));
    bands[place].style.setProperty("--low", at((value ?? 0) - margins[place]));
    bands[place].style.setProperty("--high", at((value ?? 0) + margins[place]));
  });
}

const spoken = (line, list) =>
  `${keyText(line.row, 40)}: ${partNames(list)
    .map((name, place) => `${name} ${withMargin(line.list.values[place], line.list.stddev?.[place] ?? null)}`)
    .join("; ")}`;

/** The same as a table. */
function showNumbers(list, lines) {
  const head = make("tr", {}, make("th", { scope: "col" }, isBins(list) ? "From and to" : "Quantile"),
    lines.map((line) => make("th", { scope: "col" }, keyNode(line.row, 28))));
  const rows = partNames(list).map((name, place) =>
    make("tr", {}, make("th", { scope: "row" }, name),
      lines.map((line) => make("td", {}, withMargin(line.list.values[place], line.list.stddev?.[place] ?? null)))),
  );
  byId("spread-table").replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, rows)));
}
