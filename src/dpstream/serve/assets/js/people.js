// How far users get, and when they come back: funnels as bars that get shorter, cohorts as a grid.
import * as api from "./api.js";
import { byId, make, reconcile, write } from "./dom.js";
import { BAND, count as many, listed, margin, number, percent, span, withMargin } from "./format.js";
import { keyNode } from "./keys.js";

const MOST_FUNNELS = 6;
const MOST_COHORTS = 60; // rows of the grid: five years of months
const MOST_LAGS = 60;
const MOST_ROWS = 200; // steps of all funnels that are looked at
const AT_ONCE = 12; // ids that one question to the feed may name

/** Show what fits the query; `window` is a window's number, or null for the newest. */
export async function showPeople(query, window) {
  const { picture } = query;
  if (!picture) {
    byId("people").hidden = true;
    return;
  }
  const { rows, matched } = await api.picture(query.name, { window, limit: MOST_ROWS });
  const groups = grouped(query, rows);
  byId("people").hidden = !groups.length;
  if (picture.kind === "funnel") showFunnels(query, groups, matched - rows.length);
  else await showCohorts(query, groups[0]);
}

const placeOf = (query, name) => query.columns.keys.indexOf(name);
const share = (row, count) => ({
  value: row.values[`${count}_share`] ?? null,
  low: row.low?.[`${count}_share`] ?? null,
  high: row.high?.[`${count}_share`] ?? null,
});

/** "27%, or 25% to 28%": a share, and the interval that holds the true one 19 times out of 20. */
function shareText({ value, low, high }) {
  if (value === null) return "";
  return low === null || high === null ? percent(value) : `${percent(value)} (${percent(low)} to ${percent(high)})`;
}

/** Rows by what else the query groups by, the largest first; each in order of its steps or lags. */
function grouped(query, rows) {
  const { picture } = query;
  const at = placeOf(query, picture.order);
  const by = picture.by.map((name) => placeOf(query, name));
  const found = new Map();
  for (const row of rows) {
    const key = by.map((place) => row.key[place]);
    const name = JSON.stringify(key);
    if (!found.has(name)) found.set(name, { id: name, row: { ...row, key, cut: by.map((place) => row.cut?.[place]) }, rows: [] });
    found.get(name).rows.push({ ...row, number: Number(row.key[at]) });
  }
  for (const one of found.values()) one.rows.sort((a, b) => a.number - b.number);
  const first = ({ rows: [row] }) => row.values[picture.count] ?? 0;
  return [...found.values()].sort((a, b) => first(b) - first(a));
}

const nameOf = ({ row }) => row.key.map((part) => (part === null ? "NULL" : String(part))).join(", ");

/** Which funnels are not drawn, by name where they are few; `unseen`: rows beyond those that were asked for. */
function funnelsLeftOut(rest, unseen) {
  if (!rest.length) return "";
  const few = rest.slice(0, 5).map((group) => `“${nameOf(group).slice(0, 40)}”`);
  const more = rest.length > few.length ? [`${many(rest.length - few.length, "more", "more")}`] : [];
  const and = unseen > 0 ? [`those of ${many(unseen, "further row")}`] : [];
  return ` The ${MOST_FUNNELS} with the most users are drawn. Left out: ${listed([...few, ...more, ...and])}; the list below and a download have them.`;
}

function showFunnels(query, all, unseen) {
  const { picture } = query;
  const { count } = picture;
  const groups = all.slice(0, MOST_FUNNELS);
  write(byId("people-title"), "How far they get");
  write(
    byId("people-note"),
    "Beside each step its share of the step before, and the interval that holds the true share 19 times out of 20. Steps are counted with noise: where nobody goes on, a later step may look larger." +
      funnelsLeftOut(all.slice(MOST_FUNNELS), unseen),
  );
  const high = Math.max(1, ...groups.flatMap(({ rows }) => rows.map((row) => (row.values[count] ?? 0) + BAND * (row.stddev[count] ?? 0))));
  byId("people-grid").hidden = true;
  byId("people-list").hidden = false;
  reconcile(byId("people-list"), groups, {
    keyOf: ({ id }) => `${query.name}/${id}`,
    create: (group) =>
      make("li", { class: "funnel s1" }, picture.by.length ? make("h4", {}, keyNode(group.row, 40)) : null, make("ol", { class: "steps" })),
    update: (node, { rows }) =>
      reconcile(node.querySelector(".steps"), rows, {
        keyOf: (row) => String(row.number),
        create: (row) =>
          make(
            "li",
            {},
            make("bdi", { class: "step-name" }, picture.steps[row.number - 1] ?? String(row.number)),
            make("span", { class: "bar", "aria-hidden": "true" }, make("i", { class: "fill" }), make("i", { class: "whisker" })),
            make("span", { class: "step-value" }),
            make("span", { class: "step-share quiet" }),
          ),
        update: (item, row) => {
          const [value, stddev] = [row.values[count] ?? 0, row.stddev[count] ?? 0];
          const at = (point) => `${(100 * Math.max(0, point)) / high}%`;
          const { style } = item.querySelector(".bar");
          for (const [name, place] of [["--from", 0], ["--to", value], ["--low", value - BAND * stddev], ["--high", value + BAND * stddev]])
            style.setProperty(name, at(place));
          write(item.querySelector(".step-value"), withMargin(row.values[count], row.stddev[count]));
          write(item.querySelector(".step-share"), shareText(share(row, count)));
        },
      }),
  });
}

/** A row for each cohort, a column for each period after it: put together from all windows. */
async function showCohorts(query, group) {
  const { count, lags } = query.picture;
  write(byId("people-title"), "Who comes back");
  write(
    byId("people-note"),
    "A row for those who began in a window, a column for each window after it: the share of them that was there again. A cell comes when its window ends, and stays. Below each share is the interval that holds the true one 19 times out of 20.",
  );
  byId("people-list").hidden = true;
  byId("people-grid").hidden = false;
  const known = (group?.rows ?? []).filter((row) => row.number <= Math.min(lags, MOST_LAGS));
  const asked = [];
  const most = MOST_COHORTS + lags;
  for (let at = 0; at < known.length; at += AT_ONCE)
    asked.push(api.cells(query.name, { id: known.slice(at, at + AT_ONCE).map((row) => row.id), window: "all", limit: most }));
  const lines = (await Promise.all(asked)).flatMap((answer) => answer.series);
  const [cells, begins] = [new Map(), new Map()];
  lines.forEach((line, place) => {
    const lag = known[place].number;
    for (const point of line.points) {
      begins.set(point.window, [point.start, point.end]);
      cells.set(`${point.window - lag}/${lag}`, point);
    }
  });
  const begun = [...begins.keys()].sort((a, b) => b - a).filter((one) => cells.has(`${one}/0`));
  const cohorts = begun.slice(0, MOST_COHORTS);
  const cut = [
    begun.length > cohorts.length || lines.some((line) => line.points.length >= most) ? `cohorts before the newest ${MOST_COHORTS}` : "",
    lags > MOST_LAGS ? `periods after the first ${MOST_LAGS}` : "",
  ].filter(Boolean);
  if (cut.length) write(byId("people-note"), `${byId("people-note").textContent} Left out here: ${listed(cut)}; a download has them.`);
  const columns = known.map((row) => row.number);
  const head = make(
    "tr",
    {},
    make("th", { scope: "col" }, "Began"),
    columns.map((lag) => make("th", { scope: "col" }, lag === 0 ? "Users" : `+${lag}`)),
  );
  const rows = cohorts.map((cohort) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, span(...begins.get(cohort)).replace(/^since /, "")),
      columns.map((lag) => cell(cells.get(`${cohort}/${lag}`), lag, count)),
    ),
  );
  byId("people-grid").replaceChildren(make("table", { class: "cohorts" }, make("thead", {}, head), make("tbody", {}, rows)));
}

function cell(point, lag, count) {
  if (!point) return make("td", {});
  const [value, stddev] = [point.values[count] ?? null, point.stddev[count] ?? null];
  const found = share(point, count);
  if (lag === 0 || found.value === null) return make("td", {}, number(value, BAND * stddev), make("small", { class: "quiet" }, ` ${margin(stddev)}`));
  const known = found.low !== null && found.high !== null;
  const node = make(
    "td",
    { class: "shaded", title: withMargin(value, stddev) },
    percent(found.value),
    known ? make("small", { class: "block" }, `${percent(found.low)} to ${percent(found.high)}`) : null,
  );
  node.style.setProperty("--share", `${Math.round(60 * Math.min(1, Math.max(0, found.value)))}%`);
  return node;
}
