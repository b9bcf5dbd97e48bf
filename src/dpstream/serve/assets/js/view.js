// What is being looked at. It lives in the address after '#', so that a link or a reload shows the same.

/** The most keys in one chart: more colours could not be told apart. */
export const MOST_PICKED = 6;
/** How many keys the chart follows when nobody picked any. */
export const FOLLOWED = 5;
/** Rows on a page of keys. */
export const PAGE = 20;

/** The address as a view; whatever does not make sense is left out. */
export function readView() {
  const said = new URLSearchParams(location.hash.slice(1));
  const window = said.get("window") ?? "newest";
  const keys = said.get("keys");
  return {
    query: said.get("query"),
    window: window === "all" || window === "newest" || /^\d{1,15}$/.test(window) ? window : "newest",
    measure: said.get("measure"),
    search: (said.get("search") ?? "").slice(0, 200),
    against: said.get("against") === "before",
    log: said.get("scale") === "log",
    zoom: zoomOf(said.get("zoom")),
    embed: said.has("embed"),
    offset: Math.max(0, Number.parseInt(said.get("from") ?? "0", 10) || 0),
    picked:
      keys === null
        ? null
        : keys
            .split(",")
            .filter((id) => /^[0-9a-f]{2,64}$/.test(id))
            .slice(0, MOST_PICKED),
  };
}

/** A part of the time, as two moments in seconds, such as 1714521600-1714543200. */
function zoomOf(text) {
  const found = /^(\d{1,12})-(\d{1,12})$/.exec(text ?? "");
  const ends = found?.slice(1).map(Number);
  return ends && ends[0] < ends[1] ? ends : null;
}

/** Put the view into the address, without a new entry in the history. */
export function writeView(view) {
  const said = new URLSearchParams();
  if (view.query) said.set("query", view.query);
  if (view.window !== "newest") said.set("window", view.window);
  if (view.measure) said.set("measure", view.measure);
  if (view.search) said.set("search", view.search);
  if (view.offset) said.set("from", String(view.offset));
  if (view.against) said.set("against", "before");
  if (view.log) said.set("scale", "log");
  if (view.zoom) said.set("zoom", view.zoom.map(Math.round).join("-"));
  if (view.embed) said.set("embed", "");
  if (view.picked) said.set("keys", view.picked.join(","));
  history.replaceState(null, "", `#${said}`);
}
