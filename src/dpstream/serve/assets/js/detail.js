// One key in full: its whole text, and its numbers.
import * as api from "./api.js";
import { byId, make } from "./dom.js";
import { figure, figureText, moment, published, withMargin } from "./format.js";
import { keyText, wholeText } from "./keys.js";
import { partNames } from "./spread.js";
import { watchForm } from "./watch.js";

const MOST_SHOWN = 100_000;
const MOST_WINDOWS = 1000;

/** Wire the dialog. */
export function startDetail() {
  byId("detail-close").addEventListener("click", () => byId("detail").close());
  byId("detail").addEventListener("click", (event) => event.target === byId("detail") && byId("detail").close());
}

/** Say in which window a key was first found; those that the server keeps are looked at. */
async function tellFirst(query, row) {
  const node = byId("found");
  try {
    const { series } = await api.watched(query.name, { id: row.id, window: "all", limit: MOST_WINDOWS });
    const first = series[0]?.points[0];
    if (!first?.start || !node.isConnected) return;
    const since = series[0].points.length < MOST_WINDOWS ? "First found in the window from" : "Found at least since";
    node.textContent = `${since} ${moment(first.start)} UTC.`;
  } catch {
    // it is no more than a remark
  }
}

/** Open the details of a row; its whole text is fetched only now. */
export async function openDetail(query, row) {
  const names = query.columns.keys;
  const texts = names.map((name, place) => {
    const cut = row.cut?.[place];
    const whole = wholeText(row.key[place]);
    return make(
      "div",
      {},
      make("h3", {}, name),
      make(
        "pre",
        { class: "whole", dir: "auto", tabIndex: 0, role: "region", "aria-label": `${name} in full` },
        whole.text,
      ),
      make("p", { class: "quiet small" }, cut ? "Fetching the rest…" : whole.note),
    );
  });
  const single = query.columns.aggregates.filter((one) => !one.list).map((one) => one.name);
  const values = single.map((name) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, name),
      make(
        "td",
        {},
        figureText({ ...figure(row, name), held: row.held }),
        make("small", { class: "block quiet" }, published(figure(row, name))),
      ),
    ),
  );
  for (const { name, list } of query.columns.aggregates) {
    const found = row.lists?.[name];
    if (!list || !found?.values) continue;
    partNames(list).forEach((part, place) =>
      values.push(
        make(
          "tr",
          {},
          make("th", { scope: "row" }, `${name}, ${part}`),
          make("td", {}, withMargin(found.values[place], found.stddev?.[place] ?? null)),
        ),
      ),
    );
  }
  byId("detail-title").textContent = keyText(row, 40);
  byId("detail-body").replaceChildren(
    ...texts,
    make("table", {}, make("caption", { class: "unseen" }, "Published values"), make("tbody", {}, values)),
    make(
      "p",
      { class: "quiet small" },
      row.first_seen ? `Published since release ${row.first_seen} of its window.` : "",
    ),
    make("p", { class: "quiet small", id: "found" }),
    watchForm(query, row) ?? "",
  );
  byId("detail").showModal();
  if (names.length && query.windows?.size) tellFirst(query, row);
  if (!row.cut?.some((length) => length)) return;
  try {
    const { key } = await api.wholeKey(query.name, row.id);
    texts.forEach((node, place) => {
      const { text, note } = wholeText(key[place]);
      node.querySelector("pre").textContent = text.slice(0, MOST_SHOWN);
      node.querySelector("p").textContent =
        text.length > MOST_SHOWN
          ? `${note}; the first ${MOST_SHOWN.toLocaleString("en")} are shown, a download has them all`
          : note;
    });
  } catch (problem) {
    if (!api.calledOff(problem))
      for (const node of texts) node.querySelector("p").textContent = `The rest cannot be had: ${problem.message}`;
  }
}
