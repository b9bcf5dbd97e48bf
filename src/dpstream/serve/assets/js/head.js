// The page's head: which query, what it says in one line, which of its numbers.
import { byId, make, reconcile, write } from "./dom.js";
import { measureName } from "./spread.js";
import { exactness, figure, listed, moment, parameter, percent, valueText } from "./format.js";

/** The list of queries; one alone needs no list. */
export function showQueries(queries, chosen, onChoose) {
  byId("queries").hidden = queries.length < 2;
  reconcile(byId("queries"), queries, {
    keyOf: (query) => query.name,
    create: (query) => {
      const button = make("button", { type: "button", class: "query" }, make("bdi", {}, query.title));
      button.addEventListener("click", () => onChoose(query.name));
      return button;
    },
    update: (button, query) => {
      if (query.name === chosen.name) button.setAttribute("aria-current", "page");
      else button.removeAttribute("aria-current");
    },
  });
}

/** Which of the query's numbers is charted and sorted by. */
export function showMeasures(aggregates, chosen, onChoose) {
  byId("measures").hidden = aggregates.length < 2;
  reconcile(byId("measures"), aggregates, {
    keyOf: ({ name }) => name,
    create: ({ name }) => {
      const input = make("input", { type: "radio", name: "measure", value: name });
      input.addEventListener("change", () => onChoose(name));
      return make("label", {}, input, make("span", {}, name));
    },
    update: (label, { name }) => {
      label.querySelector("input").checked = name === chosen?.name;
    },
  });
  const bins = chosen?.list?.kind === "histogram";
  write(byId("chart-title"), !chosen ? "Over time" : bins ? `${chosen.name} by part of the range` : `${measureName(chosen)} over time`);
}

/** What the query is called, and what is said about it. */
function showName(query) {
  write(byId("title"), query.title);
  document.title = `${query.title} · dpstream`;
  byId("description").hidden = !query.description;
  write(byId("description"), query.description ?? "");
}

/** The title and one line of what is seen. */
export function showHead(query, page, sort) {
  showName(query);
  const { keys, aggregates } = query.columns;
  const what = listed(aggregates.map((one) => one.name)) + (keys.length ? ` by ${listed(keys)}` : "");
  const { every, size } = query.windows ?? {};
  const often = every ? `, every ${every.replace(/^1 /, "")}` : size ? `, per ${size.replace(/^1 /, "")}` : "";
  const release = !page.time
    ? "Published once."
    : page.releases === 1
      ? `Published ${moment(page.time)} UTC.`
      : `Release ${page.release_index}${page.releases ? ` of ${page.releases}` : ""}, ${moment(page.time)} UTC.`;
  const unit = query.unit && !query.mechanism ? ` Each ${query.unit} is protected` : " Protected";
  const much = query.epsilon
    ? ` with ε = ${parameter(query.epsilon)}${query.delta ? `, δ = ${parameter(query.delta)}` : ""}.`
    : ".";
  const over = query.refused ? " No more will come: the privacy budget of this query is used up." : "";
  write(byId("summary"), `${what}${often}. ${release}${over}${unit}${much}${chosenBounds(query, page)}`);
  write(byId("keys-title"), sort ? `Top keys by ${sort}` : "Keys");
  write(byId("kept-note"), notCounted(query, page));
  showNumbers(query, page);
}

/** Which bounds hold where each period has its own, and since when: a sentence. */
export function chosenBounds(query, { bounds }) {
  if (!bounds) return "";
  const rows = bounds.max_rows_per_group;
  const clamps = Object.entries(bounds.contribution_bounds_per_row ?? {});
  const parts = [
    `counts in ${number(bounds.max_groups_contributed)} keys at most`,
    ...(rows ? [`with ${number(rows)} rows in each`] : []),
    ...clamps.map(([name, [low, high]]) => `values of ${name} within ${number(low)} and ${number(high)}`),
  ];
  return ` Since ${moment(bounds.since)} UTC each ${query.unit ?? "unit"} ${parts.join(", ")}: chosen by earlier releases.`;
}

/** What stands beside the legend of the band: how much it says nothing of. */
export function notCounted(query, page) {
  if (query.dropped_rows === "not measured") return "; how many rows are not counted is not measured";
  if (query.dropped_rows !== "measured") return "";
  const share = page.kept_share;
  if (share === null || share === undefined) return "; too few rows to say how many are not counted";
  return `; about ${percent(1 - share)} of the rows are not counted`;
}

/** Before the first release, or instead of it. */
export function showNothing(query) {
  showName(query);
  write(
    byId("summary"),
    query.refused
      ? "Nothing was published, and nothing will be: the privacy budget of this query is used up."
      : "Nothing has been published yet. The first release comes when its time has come: what is published when does not depend on the data.",
  );
}

/** Without keys there is one row: its numbers, large. */
function showNumbers(query, page) {
  const [row] = page.rows;
  byId("numbers-card").hidden = query.columns.keys.length > 0 || !row;
  if (byId("numbers-card").hidden) return;
  const single = query.columns.aggregates.filter((one) => one.list?.kind !== "histogram");
  byId("numbers-card").hidden = !single.length;
  reconcile(byId("numbers"), single, {
    keyOf: (one) => one.name,
    create: (one) =>
      make("div", {}, make("dt", {}, measureName(one)), make("dd", {}, make("b"), make("span", { class: "quiet" }))),
    update: (node, { name }) => {
      write(node.querySelector("b"), valueText(figure(row, name)));
      write(node.querySelector("span"), exactness(figure(row, name)));
    },
  });
}
