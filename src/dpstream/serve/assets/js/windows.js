// Which window is shown: the newest (followed), one of the past, or one point for each.
import * as api from "./api.js";
import { byId, make } from "./dom.js";
import { span } from "./format.js";

export class Windows {
  constructor(onChoose) {
    this.known = [];
    this.next = null;
    this.select = byId("window");
    this.select.addEventListener("change", async () => {
      if (this.select.value === "more") await this.#more();
      else onChoose(this.select.value);
    });
    byId("older").addEventListener("click", () => this.#step(1, onChoose));
    byId("newer").addEventListener("click", () => this.#step(-1, onChoose));
  }

  /** Learn the windows of a query anew and show `chosen`. */
  async load(query, chosen) {
    const answer = await api.windows(query);
    const old =
      this.query === query && this.known.length > answer.windows.length ? this.known.slice(answer.windows.length) : [];
    const fresh = new Set(answer.windows.map((one) => one.window));
    this.known = [...answer.windows, ...old.filter((one) => !fresh.has(one.window))];
    if (!old.length) this.next = answer.next;
    this.query = query;
    this.show(chosen);
  }

  show(chosen) {
    this.chosen = chosen;
    const several = this.known.length > 1;
    const wanted = [
      ["newest", this.known.length ? `${several ? "Newest: " : ""}${name(this.known[0])}` : "No window yet"],
    ];
    if (several) wanted.push(["all", "All windows, one point each"]);
    for (const one of this.known.slice(1)) wanted.push([String(one.window), name(one)]);
    if (this.next !== null && this.next !== undefined) wanted.push(["more", "Older …"]);
    const now = [...this.select.options].map((option) => `${option.value} ${option.text}`).join("|");
    if (now !== wanted.map(([value, text]) => `${value} ${text}`).join("|")) {
      this.select.replaceChildren(...wanted.map(([value, text]) => make("option", { value }, text)));
    }
    this.select.value = [...this.select.options].some((option) => option.value === chosen) ? chosen : "newest";
    this.select.disabled = !several;
    const place = this.#place();
    byId("older").disabled = !several || chosen === "all" || place >= this.known.length - 1;
    byId("newer").disabled = !several || chosen === "all" || place <= 0;
  }

  /** The window before this one, if it is known. */
  before(window) {
    const place = this.known.findIndex((one) => one.window === window);
    return place < 0 ? null : (this.known[place + 1] ?? null);
  }

  #place() {
    return this.chosen === "newest" ? 0 : this.known.findIndex((one) => String(one.window) === this.chosen);
  }

  #step(by, onChoose) {
    const place = this.#place() + by;
    if (place < 0 || place >= this.known.length) return;
    onChoose(place === 0 ? "newest" : String(this.known[place].window));
  }

  async #more() {
    const answer = await api.windows(this.query, this.next);
    this.known.push(...answer.windows);
    this.next = answer.next;
    this.show(this.chosen);
  }
}

const name = (one) => span(one.start, one.end);
