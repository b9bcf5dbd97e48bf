// The page: what is looked at, fetched anew whenever something was published, shown in place.
import * as api from "./api.js";
import { showBudget } from "./budget.js";
import { Chart } from "./chart.js";
import { openDetail, startDetail } from "./detail.js";
import { byId, debounce, make, paced, write } from "./dom.js";
import { showExplain } from "./explain.js";
import { count, figure, moment } from "./format.js";
import { showHead, showMeasures, showNothing, showQueries } from "./head.js";
import { pointText, showLegend, showTable } from "./legend.js";
import { listen, status } from "./live.js";
import { showPeople } from "./people.js";
import { Slots } from "./slots.js";
import { measureName, showSpread } from "./spread.js";
import { startTheme } from "./theme.js";
import { TopKeys } from "./top.js";
import { checkWatches } from "./watch.js";
import { FOLLOWED, MOST_PICKED, PAGE, readView, writeView } from "./view.js";
import { WhatIf } from "./whatif.js";
import { Windows } from "./windows.js";

const MOST_POINTS = 400; // of a line: more could not be told apart on a screen
const PACE = 200; // milliseconds: releases that come closer together are fetched together

const view = readView();
const slots = new Slots();
const whatIf = new WhatIf();
let queries = [];
let query = null;
let answer = null;
let books = { datasets: [] };

const open = (row) => openDetail(query, row);
const chart = new Chart(byId("chart"), (index, model, spoken) =>
  showLegend({
    model,
    index,
    spoken,
    picked: query.columns.keys.length ? "some" : "only",
    onRemove: (id) => pick({ id }, false),
    onOpen: open,
    onPoint: (slot) => chart.emphasise(slot),
  }),
  (zoom) => go({ zoom }),
);
const topKeys = new TopKeys({ onPick: pick, onOpen: open });
const windows = new Windows((window) => go({ window, offset: 0 }));

/** Change what is looked at. */
function go(changes) {
  Object.assign(view, changes);
  if ("query" in changes)
    Object.assign(view, { window: "newest", measure: null, search: "", offset: 0, picked: null }, changes);
  if ("query" in changes || "window" in changes) view.zoom = null;
  writeView(view);
  return refresh();
}

function pick({ id }, wanted) {
  const now = view.picked ?? chart.model?.lines.map((line) => line.id) ?? [];
  const next = now.filter((one) => one !== id);
  if (wanted) next.push(id);
  return go({ picked: next.slice(-MOST_PICKED) });
}

/** Fetch and show everything about the view, and whether the server is there. What is shown stays until it is replaced. */
async function refresh() {
  try {
    document.body.classList.toggle("alone", view.embed);
    if (!queries.length) return true;
    query = queries.find((one) => one.name === view.query) ?? queries[0];
    const aggregate = aggregates().find((one) => one.name === view.measure) ?? aggregates()[0];
    const measure = aggregate?.name;
    const bins = aggregate?.list?.kind === "histogram";
    // Bins are no one number: their keys are in the order of another one, if there is one.
    const sort = bins ? aggregates().find((one) => one.list?.kind !== "histogram")?.name : measure;
    const keyed = query.columns.keys.length > 0;
    if (document.activeElement !== byId("search")) byId("search").value = view.search;
    showQueries(queries, query, (name) => go({ query: name }));
    showMeasures(aggregates(), aggregate, (name) => go({ measure: name, offset: 0 }));
    showExplain(query);
    whatIf.show(query);
    showBudget(books, query);
    byId("keys-card").hidden = !keyed;
    const window = view.window === "newest" || view.window === "all" ? null : view.window;
    // One release a window is one point: only together they make a line.
    const all = view.window === "all" || (view.window === "newest" && query.windows?.releases_per_window === 1);
    const [page, first] = await Promise.all([
      api.latest(query.name, { window, sort, limit: PAGE, offset: view.offset, q: view.search }),
      view.picked || (!view.search && !view.offset)
        ? null
        : api.top(query.name, { window, sort, limit: FOLLOWED }),
      windows.load(query.name, view.window),
      showPeople(query, window),
    ]);
    answer = page;
    const ids = view.picked ?? (first ?? page).rows.slice(0, keyed ? FOLLOWED : 1).map((row) => row.id);
    slots.assign(ids);
    showHead(query, page, sort);
    topKeys.show({ answer: page, measure, bins, search: view.search, slots });
    byId("csv").href = api.download(query.name, "csv", page.window);
    byId("parquet").href = api.download(query.name, "parquet", page.window);
    byId("follow").hidden = view.picked === null;
    // A query without time publishes once: there is no course to draw, but there may be a spread.
    const drawn = page.time || aggregate?.list || query.picture;
    byId("chart-card").hidden = !drawn;
    byId("chart-card").classList.toggle("bins-only", bins || !page.time);
    if (drawn) await draw(ids, { window, all, aggregate, bins });
    write(byId("trouble"), "");
    byId("trouble").hidden = true;
    return true;
  } catch (problem) {
    if (api.calledOff(problem)) return true;
    if (problem instanceof api.Refused && problem.status === 404 && view.window === "newest") showNothing(query);
    else if (problem instanceof api.Refused) fail(problem.message);
    else if (problem instanceof TypeError && /fetch|network/i.test(problem.message)) return lost();
    else throw problem;
    return true;
  }
}

const aggregates = () => query.columns.aggregates;
const seconds = (text) => (text ? new Date(text).getTime() / 1000 : null);

/** What is drawn of a key: a window stands at its start, a release within one at its own time. */
const pointsOf = (one, measure, all, moved = 0) =>
  one.points.map((point) => ({
    time: (seconds(all ? (point.start ?? point.time) : point.time) ?? 0) + moved,
    ...figure(point, measure),
    held: point.held ?? false,
    open: all && point.final === false,
  }));

/** The lines of the window before, by key, at the times of the one that is shown; none if it is not asked for. */
async function windowBefore(ids, { all, measure, bins, start }) {
  // What is made of several windows shares their noise: the margin of a change is not known then.
  const before = all || bins || !start || query.looks_back ? null : windows.before(answer.window);
  byId("against-label").hidden = !before;
  if (!before || !view.against || !ids.length) return new Map();
  const found = await api.before(query.name, { id: ids, window: before.window, limit: MOST_POINTS });
  const moved = seconds(start) - seconds(before.start);
  return new Map(found.series.map((one) => [one.id, pointsOf(one, measure, false, moved)]));
}

async function draw(ids, { window, all, aggregate, bins }) {
  const measure = aggregate?.name;
  const [found, earlier] = await Promise.all([
    ids.length
      ? api.series(query.name, { id: ids, window: all ? "all" : window, limit: MOST_POINTS })
      : { series: [], start: answer.start, end: answer.end },
    windowBefore(ids, { all, measure, bins, start: answer.start }),
  ]);
  const lines = found.series
    .filter((one) => one.key !== null)
    .map((one) => {
      const points = bins ? [] : pointsOf(one, measure, all);
      const before = earlier.get(one.id);
      const then = new Map(before?.map((point) => [point.time, point]));
      for (const point of points) point.since = then.get(point.time);
      const widest = points.reduce((found, point) => Math.max(found, pointText(point).length), 1);
      return {
        before,
        id: one.id,
        widest,
        row: rowOf(one),
        slot: slots.of(one.id),
        points,
        list: one.lists?.[measure],
        at: new Map(points.map((point) => [point.time, point])),
        late: all ? undefined : one.first_seen > 1,
      };
    });
  const [start, end] = all ? [null, null] : [seconds(found.start), seconds(found.end)];
  const { zoom, log } = view;
  chart.show({ lines, start, end, zoom, log, all });
  showSpread({ aggregate: aggregate ?? {}, lines });
  byId("log").checked = log;
  byId("against").checked = view.against;
  byId("zoom-off").hidden = byId("pan-back").hidden = byId("pan-on").hidden = !zoom;
  byId("open-note").hidden = !lines.some((line) => line.points.some((point) => point.open));
  byId("against-note").hidden = !earlier.size;
  showTable(chart.model);
  byId("chart").setAttribute(
    "aria-label",
    `${aggregate ? measureName(aggregate) : ""} over time for ${count(lines.length, "key")}, with 95% bands. Left and right arrow keys move between releases.`,
  );
}

/** A key of the chart as a row: with its newest numbers. */
function rowOf(one) {
  const known = answer.rows.find((row) => row.id === one.id);
  const last = one.points.at(-1);
  return (
    known ?? {
      id: one.id,
      key: one.key,
      cut: one.cut,
      values: last?.values ?? {},
      stddev: last?.stddev ?? {},
      first_seen: one.first_seen,
    }
  );
}

function lost() {
  status("lost", "Reconnecting…");
  return false;
}

function fail(words) {
  byId("trouble").hidden = false;
  write(byId("trouble"), words);
}

/** Learn everything anew: at the beginning, after each release, and whenever the stream comes back. */
async function reload() {
  try {
    queries = await api.queries();
    if (!queries.length) fail("This pipeline has no queries.");
    books = await api.ledger();
    if (await refresh()) status("live", liveText());
    await checkWatches();
  } catch (problem) {
    if (api.calledOff(problem)) return;
    if (problem instanceof api.Refused) fail(problem.message);
    else lost();
  }
}

function liveText() {
  const [over, refused] = ["finished", "refused"].map((state) => queries.filter((one) => one[state]).length);
  const ended = queries.length && over + refused === queries.length;
  const word = !ended ? "Live" : refused ? "Stopped: the privacy budget is used up" : "Complete";
  const newest = windows.known[0]?.last_release_time;
  return newest ? `${word} · newest ${moment(newest)} UTC` : word;
}

const released = paced(reload, PACE);

const follow = make("button", { type: "button", class: "link", id: "follow", hidden: true }, "Follow the largest keys");
follow.addEventListener("click", () => go({ picked: null }));
byId("legend").after(follow);
byId("search").addEventListener(
  "input",
  debounce(() => go({ search: byId("search").value, offset: 0 }), 180),
);
byId("prev").addEventListener("click", () => go({ offset: Math.max(0, view.offset - PAGE) }));
byId("next").addEventListener("click", () => go({ offset: view.offset + PAGE }));
byId("zoom-in").addEventListener("click", () => chart.zoomBy(1 / 2));
byId("zoom-out").addEventListener("click", () => chart.zoomBy(2));
byId("pan-back").addEventListener("click", () => chart.zoomBy(1, -0.5));
byId("pan-on").addEventListener("click", () => chart.zoomBy(1, 0.5));
byId("zoom-off").addEventListener("click", () => go({ zoom: null }));
byId("log").addEventListener("change", () => go({ log: byId("log").checked }));
byId("against").addEventListener("change", () => go({ against: byId("against").checked }));
byId("frame").addEventListener("click", (event) => {
  event.preventDefault();
  go({ embed: true });
});
byId("as-table").addEventListener("toggle", () => chart.model && showTable(chart.model));
addEventListener("hashchange", () => {
  Object.assign(view, readView());
  refresh();
});
byId("told-close").addEventListener("click", () => (byId("told").hidden = true));
startTheme(() => chart.recolour());
startDetail();
listen({ onOpen: reload, onRelease: () => released() });
setInterval(released, 60_000); // no release tells that none will come any more
