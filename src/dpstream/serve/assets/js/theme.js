// Light, dark, or what the system says.
import { byId } from "./dom.js";

const STORE = "dpstream-theme";

/** Wire the switch; `changed` is called whenever colours may have changed. */
export function startTheme(changed) {
  const box = byId("theme");
  const chosen = document.documentElement.dataset.theme ?? "auto";
  box.querySelector(`input[value="${chosen}"]`).checked = true;
  box.addEventListener("change", (event) => {
    const value = event.target.value;
    if (value === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = value;
    try {
      if (value === "auto") localStorage.removeItem(STORE);
      else localStorage.setItem(STORE, value);
    } catch {
      // Storage may be forbidden: the choice then holds for this visit.
    }
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}

/** What a colour of the style sheet is just now; canvases know no custom properties. */
export function colour(name) {
  const probe = byId("chart");
  const before = probe.style.color;
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color;
  probe.style.color = before;
  return found;
}
