// What a reader wants to be told of: a key that is above, or below, a number for certain. It stays in this browser.
import * as api from "./api.js";
import { byId, make, reconcile, write } from "./dom.js";
import { BAND, moment, withMargin } from "./format.js";
import { keyText } from "./keys.js";

const PLACE = "dpstream-watches";
const MOST = 12; // as many as one question to the feed may name

function known() {
  try {
    const found = JSON.parse(localStorage.getItem(PLACE) ?? "[]");
    return Array.isArray(found) ? found.filter((one) => one && typeof one.id === "string").slice(0, MOST) : [];
  } catch {
    return []; // no storage, or not ours
  }
}

function keep(watches) {
  try {
    localStorage.setItem(PLACE, JSON.stringify(watches));
  } catch {
    // without storage it holds until the page is left
  }
}

let watches = known();
const words = ({ name, measure, above, level }) => `${measure} of ${name} ${above ? "above" : "below"} ${level}`;

/** Is the whole band on that side? A number that lies near the level is asked again at each release. */
export const certain = ({ above, level }, { value, stddev }) =>
  value !== null && stddev !== null && (above ? value - BAND * stddev > level : value + BAND * stddev < level);

/** The form of one key's details. */
export function watchForm(query, row) {
  const measures = query.columns.aggregates.filter((one) => one.stddev && one.list?.kind !== "histogram").map((one) => one.name);
  if (!measures.length) return null;
  const option = (value, text = value) => make("option", { value }, text);
  const measure = make("select", { name: "measure", "aria-label": "Which number" }, measures.map((one) => option(one)));
  const side = make("select", { "aria-label": "Above or below" }, option("above"), option("below"));
  const level = make("input", { type: "number", step: "any", required: true, "aria-label": "Number" });
  const list = make("ul", { class: "watches" });
  const form = make(
    "form",
    { class: "watch" },
    make("h3", {}, "Tell me"),
    make("p", {}, "when ", measure, " is ", side, " ", level, " by its whole margin ", make("button", { type: "submit" }, "Watch")),
    list,
  );
  const show = () =>
    reconcile(list, watches.filter((one) => one.id === row.id && one.query === query.name), {
      keyOf: words,
      create: (one) => {
        const out = make("button", { type: "button", class: "link" }, "Forget");
        out.addEventListener("click", () => {
          watches = watches.filter((each) => each !== one);
          keep(watches);
          show();
        });
        return make("li", {}, `${words(one)} `, out);
      },
      update: () => {},
    });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const one = {
      query: query.name,
      id: row.id,
      name: keyText(row, 40),
      measure: measure.value,
      above: side.value === "above",
      level: Number(level.value),
    };
    watches = [...watches.filter((each) => each.query !== one.query || words(each) !== words(one)), one].slice(-MOST);
    keep(watches);
    show();
    if ("Notification" in window && Notification.permission === "default") Notification.requestPermission();
    checkWatches();
  });
  show();
  return form;
}

/** Look at what is watched, and tell of what holds now: once in a window. */
export async function checkWatches() {
  for (const query of new Set(watches.map((one) => one.query))) {
    const mine = watches.filter((one) => one.query === query);
    let found;
    try {
      found = await api.watched(query, { id: mine.map((one) => one.id), limit: 2 });
    } catch {
      continue; // the query is gone, or the server: what is shown says so
    }
    for (const one of mine) {
      const point = found.series.find((line) => line.id === one.id)?.points.at(-1);
      if (!point || one.told === point.window) continue;
      const [value, stddev] = [point.values[one.measure] ?? null, point.stddev[one.measure] ?? null];
      if (!certain(one, { value, stddev })) continue;
      one.told = point.window;
      keep(watches);
      tell(`${words(one)}: ${withMargin(value, stddev)}, ${moment(point.time)} UTC`);
    }
  }
}

function tell(text) {
  byId("told").hidden = false;
  write(byId("told-text"), text);
  if ("Notification" in window && Notification.permission === "granted") new Notification("dpstream", { body: text });
}
