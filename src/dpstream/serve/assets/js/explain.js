// The promise and the noise in plain words.
import { byId, make } from "./dom.js";
import { margin, number, parameter } from "./format.js";

/** What is known of the rows that the bounds leave out. */
const DROPPED = {
  measured: [
    "How many rows the bounds leave out is measured, with noise, at every release, for all keys together. One key may lose more, or nothing: where a query asks for a confidence, “high_all” says how large a number of all rows may be, if no key loses more than three times the share that all lose together.",
  ],
  "not measured": ["How many rows the bounds leave out is not measured: the query says report_bias = false."],
  none: ["The bounds of this query leave nothing out."],
};

let shown = "";

/** Explain a query; nothing is redrawn while it stays the same. */
export function showExplain(query) {
  const text = JSON.stringify(query);
  if (text === shown) return;
  shown = text;
  const said = query.explain;
  const parts = [];
  const part = (title, ...children) => parts.push(make("div", {}, make("h3", {}, title), ...children));
  const paragraph = (...words) => make("p", {}, ...words);

  part(
    "± and the bands",
    paragraph(
      "Random noise of a known size is added to every number before it is published. Of the rows that are counted, the exact number lies within ± the margin about 19 times out of 20. The margin says how large the noise is; it does not cover rows that the query’s bounds leave out, nor what is cut off values beyond their limits.",
    ),
    ...(DROPPED[query.dropped_rows] ?? []).map((words) => paragraph(words)),
  );
  if (query.margins === false)
    part("No margins", paragraph(`${query.mechanism} publishes no margin: how far its numbers are off depends on the data.`));
  if (query.mechanism)
    part(
      "Held values",
      paragraph(
        "Where a number is marked “held” it repeats an older release, to save budget. The stream may have moved since: the margin of pacer grows with that, those of others know nothing of it.",
      ),
    );
  if (said && typeof said === "object") {
    if (said.unit) part("What is protected", paragraph(said.unit));
    if (said.columns?.length) part("How large the noise is", make("ul", {}, said.columns.map(noise)));
    if (said.keys) part("When a key appears", paragraph(sentence(said.keys.words)));
    part("How private", paragraph(...epsilonWords(query)));
    if (said.stages?.length) part("What happens to the rows", stages(said.stages));
    if (said.not_protected?.length)
      part(
        "What is not protected",
        make(
          "ul",
          {},
          said.not_protected.map((one) => make("li", {}, sentence(one))),
        ),
      );
  } else {
    part("How private", paragraph(...epsilonWords(query)));
    if (said) part("In the words of the query’s plan", make("pre", {}, String(said)));
  }
  if (query.sql)
    parts.push(
      make(
        "details",
        { class: "plain" },
        make("summary", {}, "The query in SQL"),
        make("pre", { tabIndex: 0, role: "region", "aria-label": "The query in SQL" }, query.sql.trim()),
      ),
    );
  byId("explain").replaceChildren(...parts);
}

const sentence = (words) => {
  const text = (words ?? "").trim();
  return text ? `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}` : "";
};

function noise({ column, first, last, note }) {
  if (last === null || last === undefined)
    return make("li", {}, make("b", {}, column), `: ${(note ?? "").trim() || "each release says its own"}`);
  const same = first === last || first === undefined || first === null;
  return make(
    "li",
    {},
    make("b", {}, column),
    same ? `: ${margin(last)}` : `: ${margin(first)} at a window’s first release, ${margin(last)} at its last`,
    note ? make("span", { class: "quiet" }, note) : null,
  );
}

function epsilonWords(query) {
  if (!(query.epsilon > 0)) return ["See the budget."];
  const factor = Math.exp(query.epsilon);
  const bet = factor < 1000 ? `by a factor of at most ${number(factor, factor / 10)}` : "by a bounded factor only";
  const delta = query.delta ? `, but for a chance of ${parameter(query.delta)}` : "";
  return [
    make("b", {}, `ε = ${parameter(query.epsilon)}`),
    query.delta ? make("b", {}, `, δ = ${parameter(query.delta)}`) : "",
    `: whatever is published here, being in the data or not changes the odds of it ${bet}${delta}. Smaller is more private.`,
  ];
}

function stages(steps) {
  const list = (noisy) =>
    steps
      .filter((step) => step.noisy === noisy)
      .map((step) => make("li", {}, make("b", {}, step.stage), ` ${step.does}`));
  return make(
    "div",
    { class: "stages" },
    make("div", { class: "exact" }, make("span", { class: "tag" }, "exact, never leaves"), make("ol", {}, list(false))),
    make(
      "div",
      { class: "noisy" },
      make("span", { class: "tag" }, "noisy, may be published"),
      make("ol", {}, list(true)),
    ),
  );
}
