// The keys of the newest release, largest first, with error bars and whether their order can be trusted.
import { byId, make, reconcile, write } from "./dom.js";
import { count, ends, exactness, figure, valueText } from "./format.js";
import { keyNode, keyText } from "./keys.js";
import { strip } from "./spread.js";
import { PAGE } from "./view.js";

export class TopKeys {
  /** `onPick(row, wanted)` when a key goes in or out of the chart, `onOpen(row)` for its details. */
  constructor({ onPick, onOpen }) {
    this.onPick = onPick;
    this.onOpen = onOpen;
    this.scale = { of: "", low: 0, high: 1 };
  }

  /** Show one page of keys. */
  show({ answer, measure, bins, search, slots }) {
    const rows = answer.rows.map((row, place) => ({
      row,
      rank: search || !answer.sort ? null : answer.offset + place + 1,
      last: place === answer.rows.length - 1,
    }));
    this.#rescale(answer, measure, search);
    reconcile(byId("keys"), rows, {
      keyOf: ({ row }) => row.id,
      create: ({ row }) => this.#create(row),
      update: (node, item) => this.#update(node, item, { measure, bins, slots }),
    });
    this.#notes(answer, search);
  }

  /** Bars of all pages share the scale of the first: a page of small keys does not look large. */
  #rescale(answer, measure, search) {
    const of = `${answer.query}/${answer.window}/${measure}`;
    if (this.scale.of !== of) this.scale = { of, low: 0, high: 0 };
    const reached = answer.rows.flatMap((row) => {
      const one = figure(row, measure);
      return [one.value ?? 0, ...(ends(one) ?? [])];
    });
    const fresh = answer.offset === 0 && !search;
    const [low, high] = [Math.min(0, ...reached), Math.max(0, ...reached)];
    this.scale.low = fresh ? low : Math.min(this.scale.low, low);
    this.scale.high = fresh ? high : Math.max(this.scale.high, high);
  }

  #create(row) {
    const pick = make("input", { type: "checkbox", class: "pick", "aria-label": `Show ${keyText(row)} in the chart` });
    pick.addEventListener("change", () => this.onPick(row, pick.checked));
    const name = make("button", { type: "button", class: "name" }, keyNode(row));
    name.addEventListener("click", () => this.onOpen(node.row));
    const node = make(
      "li",
      { class: "row" },
      make("span", { class: "rank", "aria-hidden": "true" }),
      pick,
      name,
      make(
        "span",
        { class: "bar", "aria-hidden": "true" },
        make("i", { class: "fill" }),
        make("i", { class: "whisker" }),
        make("span", { class: "strip", hidden: true }),
      ),
      make("span", { class: "value" }, make("b"), make("small")),
      make(
        "span",
        { class: "tie" },
        make("span", { "aria-hidden": "true", title: "Too close at this noise to say which is larger" }, "≈"),
        make("span", { class: "unseen" }, "too close to the next one to say which is larger"),
      ),
    );
    return node;
  }

  #update(node, { row, rank, last }, { measure, bins, slots }) {
    node.row = row;
    strip(node.querySelector(".strip"), bins ? row.lists?.[measure] : null);
    for (const part of [".bar > .fill", ".bar > .whisker"]) node.querySelector(part).hidden = bins;
    const one = figure(row, measure);
    const value = one.value ?? 0;
    const [from, to] = ends(one) ?? [value, value];
    const slot = slots.of(row.id);
    node.className = slot === undefined ? "row" : `row picked s${slot + 1}`;
    node.querySelector(".pick").checked = slot !== undefined;
    write(node.querySelector(".rank"), rank === null ? "" : String(rank));
    write(node.querySelector(".value b"), bins ? "" : valueText(one));
    write(node.querySelector(".value small"), bins ? "" : `${exactness(one)}${row.held ? " held" : ""}`);
    node.querySelector(".tie").hidden = row.ordered !== false || last;
    const { low, high } = this.scale;
    const at = (point) => `${((Math.min(high, Math.max(low, point)) - low) / (high - low || 1)) * 100}%`;
    const style = node.querySelector(".bar").style;
    style.setProperty("--zero", at(0));
    style.setProperty("--from", at(Math.min(0, value)));
    style.setProperty("--to", at(Math.max(0, value)));
    style.setProperty("--low", at(from));
    style.setProperty("--high", at(to));
  }

  #notes(answer, search) {
    const close = answer.rows.slice(0, -1).filter((row) => row.ordered === false).length;
    const pairs = Math.max(0, answer.rows.length - 1);
    let words = "";
    if (pairs && close)
      words = `≈ joins ${close === pairs ? "all" : close} of ${count(pairs, "neighbouring pair")}: at this noise nobody can say which of the two is larger.`;
    else if (pairs && answer.rows.slice(0, -1).every((row) => row.ordered)) words = "Each of these keys is larger than the next by more than the noise explains.";
    write(byId("order-note"), words);
    const none = byId("none");
    none.hidden = answer.rows.length > 0;
    if (search) write(none, "No published key contains this text. A key appears once enough people are behind it.");
    else
      write(
        none,
        answer.total
          ? "No keys on this page."
          : "No key has appeared yet. A key appears once enough people are behind it.",
      );
    const [from, to] = [answer.offset + 1, answer.offset + answer.rows.length];
    const found = search ? `found among ${answer.total.toLocaleString("en")}` : "";
    write(
      byId("range"),
      answer.rows.length
        ? `${from.toLocaleString("en")}–${to.toLocaleString("en")} of ${count(answer.matched, "key")} ${found}`.trim()
        : "",
    );
    byId("prev").disabled = answer.offset === 0;
    byId("next").disabled = to >= answer.matched;
    byId("pager").hidden =
      answer.matched <= PAGE &&
      answer.offset === 0 &&
      !search &&
      answer.matched === answer.rows.length &&
      answer.matched < 2;
  }
}
