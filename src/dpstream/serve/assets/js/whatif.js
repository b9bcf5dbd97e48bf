// What other budgets and bounds would do to the error: computed from public quantities, nothing is spent.
import * as api from "./api.js";
import { byId, debounce, make, write } from "./dom.js";
import { margin, number, parameter } from "./format.js";

const STEPS = 40; // of the slider, each way; ten times as much at either end

export class WhatIf {
  constructor() {
    this.form = byId("whatif");
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.ask = debounce(() => this.#ask(), 120);
  }

  /** Build the form for a query; it stays as it is while the same query is shown. */
  show(query) {
    const about = JSON.stringify([query.name, query.epsilon, query.explain?.columns]);
    if (this.query && this.about === about) return;
    [this.query, this.about] = [query, about];
    this.slider = make("input", { type: "range", id: "epsilon", min: -STEPS, max: STEPS, step: 1, value: 0 });
    this.said = make("output", { for: "epsilon" });
    this.bounds = make("div", { class: "bounds" });
    this.result = make("div", { class: "then", "aria-live": "polite" });
    const back = make("button", { type: "button", class: "link" }, "Back to what is running");
    back.addEventListener("click", () => {
      this.query = null;
      this.show(query);
    });
    this.form.replaceChildren(
      make(
        "div",
        { class: "slider" },
        make("label", { for: "epsilon" }, "Privacy loss allowed, ε"),
        this.said,
        this.slider,
        make(
          "div",
          { class: "ends quiet", "aria-hidden": "true" },
          make("span", {}, "more private"),
          make("span", {}, "more exact"),
        ),
      ),
      this.bounds,
      this.result,
      make("p", { class: "quiet small" }, "Computed from the query alone: no data are read, nothing is spent. ", back),
    );
    this.slider.addEventListener("input", () => {
      this.#say();
      this.ask();
    });
    this.inputs = null;
    this.#say();
    this.#ask();
  }

  get #epsilon() {
    return Number(((this.query.epsilon ?? 1) * 10 ** (Number(this.slider.value) / STEPS)).toPrecision(3));
  }

  #say() {
    write(this.said, parameter(this.#epsilon));
    this.slider.setAttribute("aria-valuetext", `epsilon ${parameter(this.#epsilon)}`);
  }

  async #ask() {
    const query = this.query;
    try {
      const chosen = this.inputs ? Object.fromEntries(this.inputs.map((input) => [input.name, input.value])) : {};
      const answer = await api.whatIf({ query: query.name, epsilon: this.#epsilon, ...chosen });
      if (this.query !== query) return;
      byId("whatif-card").hidden = false;
      if (!this.inputs) this.#fields(answer.now);
      this.result.replaceChildren(...this.#compare(answer));
    } catch (problem) {
      if (api.calledOff(problem) || this.query !== query) return;
      if (problem.status === 404 || problem.status === 409) byId("whatif-card").hidden = true;
      else this.result.replaceChildren(make("p", { class: "refused" }, problem.message));
    }
  }

  #fields(now) {
    const wanted = [
      ["max_groups_contributed", `Keys one ${this.query.unit ?? "unit"} may count for`],
      ["max_rows_per_group", "Rows per key"],
    ];
    this.inputs = wanted
      .filter(([name]) => now[name] && !this.query.mechanism)
      .map(([name]) =>
        make("input", {
          type: "number",
          name,
          id: `w-${name}`,
          min: 1,
          max: 1_000_000,
          step: 1,
          value: now[name],
          required: true,
        }),
      );
    for (const input of this.inputs) input.addEventListener("input", () => input.validity.valid && this.ask());
    this.bounds.replaceChildren(
      ...this.inputs.flatMap((input) =>
        make("label", { for: input.id }, make("span", {}, wanted.find(([name]) => name === input.name)[1]), input),
      ),
    );
  }

  #compare({ now, then }) {
    const rows = then.columns.flatMap((column) => {
      const before = now.columns.find((one) => one.column === column.column);
      const mean = /divided by the number of rows/.test(column.note ?? "");
      const note = mean
        ? `n: rows of the key; ${half((column.most ?? column.last) / 100)} at n = 100`
        : (column.note ?? "").trim().replace(/^\(|\)$/g, "");
      const shown = (stddev) => `${half(stddev)}${mean ? " ÷ n" : ""}`;
      const line = make(
        "tr",
        {},
        make("th", { scope: "row" }, column.column),
        make("td", {}, shown(before?.most ?? before?.last)),
        make("td", {}, make("b", {}, shown(column.most ?? column.last))),
        make("td", { class: "quiet" }, ratio(before?.most ?? before?.last, column.most ?? column.last)),
      );
      return note
        ? [line, make("tr", { class: "note" }, make("td", { class: "quiet small", colSpan: 4 }, note))]
        : [line];
    });
    const parts = [
      make(
        "table",
        {},
        make("caption", { class: "unseen" }, "Expected error now and then"),
        make(
          "thead",
          {},
          make(
            "tr",
            {},
            ["Error", "now", "then", ""].map((word) => (word ? make("th", { scope: "col" }, word) : make("td"))),
          ),
        ),
        make("tbody", {}, rows),
      ),
    ];
    if (then.keys && !then.keys.public) {
      const [before, after] = [number(now.keys?.last_threshold), number(then.keys.last_threshold)];
      const units = ` ${this.query.unit ?? "unit"}s behind it to appear`;
      parts.push(
        before === after
          ? make("p", {}, "A key needs about ", make("b", {}, after), `${units}.`)
          : make("p", {}, "A key would need about ", make("b", {}, after), `${units}, instead of ${before}.`),
      );
    }
    if (now.alternatives?.length) parts.push(alternatives(now.alternatives));
    return parts;
  }
}

/** What other settings would do, one change each: noise, what a key needs, what bounds leave of a large unit. */
function alternatives(found) {
  const heads = ["Setting", "error", "to appear", "kept"];
  const rows = found.map((one) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, one.setting),
      make("td", {}, half(one.noise)),
      make("td", {}, one.threshold === null ? "–" : number(one.threshold)),
      make("td", { class: "quiet" }, `${Math.round(100 * one.kept)}%`),
    ),
  );
  return make(
    "details",
    {},
    make("summary", {}, "Why these settings"),
    make(
      "table",
      {},
      make("caption", { class: "unseen" }, "What other settings would do"),
      make("thead", {}, make("tr", {}, heads.map((word) => make("th", { scope: "col" }, word)))),
      make("tbody", {}, rows),
    ),
    make("p", { class: "quiet small" }, "Kept: what counts of a unit with twice as much as the bounds allow now."),
  );
}

const half = (stddev) => margin(stddev) || "–";

function ratio(before, after) {
  if (!(before > 0) || !(after > 0)) return "";
  const times = after / before;
  if (Math.abs(times - 1) < 0.005) return "same";
  return times > 1 ? `${Number(times.toPrecision(2))} × wider` : `${Number((1 / times).toPrecision(2))} × narrower`;
}
