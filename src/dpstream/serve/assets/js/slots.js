// Which key has which colour: a key keeps its colour for as long as it is in the chart.
import { MOST_PICKED } from "./view.js";

/** Line patterns beside the colours, so that lines differ without colour too. */
export const DASHES = [[], [9, 4], [3, 3], [12, 3, 3, 3], [6, 2], [2, 5]];

export class Slots {
  #of = new Map();

  /** Give each id a slot; ids that stay keep theirs. */
  assign(ids) {
    for (const id of [...this.#of.keys()]) if (!ids.includes(id)) this.#of.delete(id);
    for (const id of ids) {
      if (this.#of.has(id)) continue;
      const taken = new Set(this.#of.values());
      for (let slot = 0; slot < MOST_PICKED; slot += 1) {
        if (!taken.has(slot)) {
          this.#of.set(id, slot);
          break;
        }
      }
    }
  }

  of(id) {
    return this.#of.get(id);
  }
}
