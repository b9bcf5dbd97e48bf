// The ledger as a gauge: what all queries together may reveal, and what was spent on what.
import { byId, make } from "./dom.js";
import { parameter, percent } from "./format.js";

const PURPOSES = { query: "its releases", publish: "publishing", keys: "finding keys", select: "finding keys" };
let shown = "";

/** Show the books; nothing is redrawn while they stay the same. */
export function showBudget({ datasets }) {
  const text = JSON.stringify(datasets);
  if (text === shown) return;
  shown = text;
  byId("budget").replaceChildren(...(datasets.length ? datasets.map((book) => bookNode(book, datasets.length > 1)) : [make("p", { class: "quiet" }, "Nothing has been charged yet.")]));
}

function bookNode(book, named) {
  const share = (amount) => (book.total > 0 ? amount / book.total : 0);
  const items = [...book.spent_on].sort((a, b) => b.amount - a.amount);
  const gauge = make("div", { class: "gauge", role: "meter", "aria-label": `Budget of ${book.dataset}`, "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": (share(book.spent) * 100).toFixed(1), "aria-valuetext": `${percent(share(book.spent))} spent` });
  items.forEach((item, place) => {
    const part = make("i", { class: `part s${(place % 6) + 1}`, title: `${item.query}: ${percent(share(item.amount))}` });
    part.style.width = `${Math.min(1, share(item.amount)) * 100}%`;
    gauge.append(part);
  });
  return make("div", { class: "book" },
    named ? make("h3", {}, book.dataset) : null,
    make("p", { class: "big" }, make("b", {}, percent(share(book.spent))), ` spent${within(book)}, `, make("b", {}, percent(share(book.left))), " left"),
    gauge,
    make("p", {}, promise(book)),
    spentTable(items, share),
    make("p", { class: "quiet small" }, footnote(book)));
}

const within = (book) => (book.window ? ` in the last ${book.window} windows` : "");

/** The promise in plain words; the ledger's own words are the fallback. */
function promise(book) {
  if (book.epsilon === null || book.epsilon === undefined) return book.promise;
  const what = book.window ? `any events within ${book.window} successive windows` : unitWords(book);
  const delta = book.delta ? `, δ = ${parameter(book.delta)}` : "";
  return `All queries on “${book.dataset}” together may reveal at most ε = ${parameter(book.epsilon)}${delta} about ${what}. What does not fit is refused.`;
}

function unitWords(book) {
  const period = book.period && book.period !== "forever" ? `, renewed every ${book.period}` : ", for ever";
  return `all rows with one ${book.unit ?? "unit"}${period}`;
}

function spentTable(items, share) {
  if (!items.length) return make("p", { class: "quiet" }, "Nothing has been charged yet.");
  const rows = items.map((item, place) =>
    make("tr", {},
      make("th", { scope: "row" }, make("i", { class: `patch s${(place % 6) + 1}`, "aria-hidden": "true" }), make("bdi", {}, item.query), make("span", { class: "quiet" }, ` ${PURPOSES[item.purpose] ?? item.purpose}`)),
      make("td", {}, item.epsilon ? `ε ${parameter(item.epsilon)}` : ""),
      make("td", {}, percent(share(item.amount)))));
  return make("table", { class: "spent" }, make("caption", { class: "unseen" }, "What was spent on what"),
    make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "Spent on"), make("th", { scope: "col" }, "Promise"), make("th", { scope: "col" }, "Share"))),
    make("tbody", {}, rows));
}

function footnote(book) {
  if (book.measure === "mu_squared") return "Shares are of μ², the quantity in which privacy loss adds up: half of ε costs much less than half of the budget.";
  if (book.measure === "rho") return "Shares are of ρ, the quantity in which privacy loss adds up.";
  return "Amounts are declared before anything is read: they say nothing about the data.";
}
