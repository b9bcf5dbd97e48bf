// The ledger as a gauge: what all queries together may reveal, and what was spent on what.
import { byId, make } from "./dom.js";
import { parameter, percent } from "./format.js";

let shown = "";

/** Show the books; nothing is redrawn while they stay the same. */
export function showBudget({ datasets }, query) {
  const text = JSON.stringify([datasets, query.name]);
  if (text === shown) return;
  shown = text;
  const pays = (book) => book.spent_on.some((item) => item.query === query.name);
  const ours = datasets.some(pays) ? datasets.filter(pays) : datasets;
  const others = datasets.filter((book) => !ours.includes(book));
  const parts = ours.map((book) => bookNode(book, datasets.length > 1));
  if (!ours.length) parts.push(make("p", { class: "quiet" }, "Nothing has been charged yet."));
  if (others.length)
    parts.push(
      make(
        "details",
        { class: "plain" },
        make("summary", {}, `Other books (${others.length})`),
        others.map((book) => bookNode(book, true)),
      ),
    );
  byId("budget").replaceChildren(...parts);
}

function bookNode(book, named) {
  const share = (amount) => (book.total > 0 ? amount / book.total : 0);
  const groups = grouped(book.spent_on);
  const gauge = make("div", {
    class: "gauge",
    role: "meter",
    "aria-label": `Budget of ${book.dataset}`,
    "aria-valuemin": "0",
    "aria-valuemax": "100",
    "aria-valuenow": (share(book.spent) * 100).toFixed(1),
    "aria-valuetext": `${percent(share(book.spent))} spent`,
  });
  for (const { name, colour, items } of groups) {
    for (const item of drawn(items, share)) {
      const part = make("i", {
        class: `part ${colour}`,
        title: `${name}, ${item.purpose}: ${percent(share(item.amount))}`,
      });
      part.style.width = `${Math.min(1, share(item.amount)) * 100}%`;
      gauge.append(part);
    }
  }
  const renews = book.period && book.period !== "forever" ? book.period.replace(/^1 /, "") : null;
  return make(
    "div",
    { class: "book" },
    named ? make("h3", {}, book.dataset) : null,
    make(
      "p",
      { class: "big" },
      make("b", {}, percent(share(book.spent))),
      renews ? ` of what each ${renews} has is spoken for, ` : ` spent${book.window ? ` in any ${book.window} windows` : ""}, `,
      make("b", {}, percent(share(book.left))),
      renews ? ` is free; it begins anew every ${renews}` : " left",
    ),
    gauge,
    make("p", {}, promise(book)),
    groups.length ? spentTable(groups, share) : make("p", { class: "quiet" }, "Nothing has been charged yet."),
    make("p", { class: "quiet small" }, footnote(book)),
  );
}

/** What a gauge has room for: charges below 1% are one part together. */
function drawn(items, share) {
  const small = items.filter((item) => share(item.amount) < 0.01);
  if (small.length < 2) return items;
  const amount = small.reduce((total, item) => total + item.amount, 0);
  return [...items.filter((item) => !small.includes(item)), { purpose: "the rest", amount }];
}

/** The charges by query, each with a colour of its own; those for the same purpose are one. */
function grouped(charges) {
  const found = new Map();
  for (const item of charges) {
    const name = item.query ?? "others";
    if (!found.has(name)) found.set(name, { name, colour: `s${(found.size % 6) + 1}`, items: [] });
    const { items } = found.get(name);
    const same = items.findIndex((one) => one.purpose === item.purpose);
    if (same < 0) items.push(item);
    else items[same] = { ...items[same], amount: items[same].amount + item.amount };
  }
  return [...found.values()];
}

/** The promise in plain words. */
function promise(book) {
  if (book.epsilon === null || book.epsilon === undefined) return book.promise;
  const delta = book.delta ? `, δ = ${parameter(book.delta)}` : "";
  return `All queries on “${book.dataset}” together may reveal at most ε = ${parameter(book.epsilon)}${delta} about ${whose(book)}. What does not fit is refused.`;
}

function whose(book) {
  if (book.window) return `any events within ${book.window} successive windows`;
  if (book.unit !== "user") return "any one event";
  if (book.period && book.period !== "forever") return `what one person adds within a period of ${book.period}`;
  return "all that one person ever adds";
}

function spentTable(groups, share) {
  const rows = groups.flatMap(({ name, colour, items }) => {
    const [first] = items;
    const sum = items.reduce((total, item) => total + item.amount, 0);
    const head = make(
      "tr",
      {},
      make(
        "th",
        { scope: "row" },
        make("i", { class: `patch ${colour}`, "aria-hidden": "true" }),
        make("bdi", {}, name),
        items.length === 1 ? make("span", { class: "quiet small" }, ` ${first.purpose}`) : null,
      ),
      make("td", {}, first.epsilon ? `ε = ${parameter(first.epsilon)}` : ""),
      make("td", {}, percent(share(sum))),
    );
    const parts =
      items.length === 1
        ? []
        : items.map((item) =>
            make(
              "tr",
              { class: "part-of quiet" },
              make("th", { scope: "row" }, item.purpose),
              make("td"),
              make("td", {}, percent(share(item.amount))),
            ),
          );
    return [head, ...parts];
  });
  return make(
    "table",
    { class: "spent" },
    make("caption", { class: "unseen" }, "What was spent on what"),
    make(
      "thead",
      {},
      make(
        "tr",
        {},
        make("th", { scope: "col" }, "Spent on"),
        make("th", { scope: "col" }, "Promise"),
        make("th", { scope: "col" }, "Share"),
      ),
    ),
    make("tbody", {}, rows),
  );
}

function footnote(book) {
  if (book.measure === "mu_squared")
    return "Shares are of μ², the quantity in which privacy loss adds up: half of ε costs much less than half of the budget.";
  if (book.measure === "rho") return "Shares are of ρ, the quantity in which privacy loss adds up.";
  return "Amounts are declared before anything is read: they say nothing about the data.";
}
