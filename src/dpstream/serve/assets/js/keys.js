// Keys come from the data: any text at all. They are shown as text, isolated and cut.
import { make } from "./dom.js";

const LONGEST = 64;
// Signs that change what stands around them, or that nobody sees: shown by their number instead.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/gu;
const pictures = { "\n": "⏎", "\t": "⇥" };

const visible = (text) =>
  text.replace(
    UNSEEN,
    (sign) => pictures[sign] ?? `⟨${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`,
  );

/** The first characters of a text, never half of an emoji. */
function shortened(text, longest) {
  if (text.length <= longest) return [text, false];
  const segmenter = new Intl.Segmenter(undefined, { granularity: "grapheme" });
  let kept = "";
  for (const { segment } of segmenter.segment(text.slice(0, longest * 4))) {
    if (kept.length + segment.length > longest) break;
    kept += segment;
  }
  return [kept || text.slice(0, longest), true];
}

function oneText(value, fullLength, longest) {
  if (value === null || value === undefined) return { text: "no value", odd: true };
  if (value === "") return { text: "empty text", odd: true };
  if (typeof value !== "string")
    return { text: typeof value === "object" ? JSON.stringify(value) : String(value), odd: false };
  if (value.trim() === "") return { text: `${value.length} × blank`, odd: true };
  const [kept, cut] = shortened(value, longest);
  return { text: visible(kept) + (cut || fullLength ? "…" : ""), odd: false };
}

/** One key as plain text, for labels and announcements. */
export function keyText(row, longest = LONGEST) {
  if (!row.key.length) return "everything";
  return row.key.map((value, place) => oneText(value, row.cut?.[place], longest).text).join(" · ");
}

/** One key as an element: each column isolated, so that right-to-left text cannot reorder the page. */
export function keyNode(row, longest = LONGEST) {
  const node = make("span", { class: "key" });
  if (!row.key.length) node.append(make("span", { class: "key-part" }, "everything"));
  row.key.forEach((value, place) => {
    const { text, odd } = oneText(value, row.cut?.[place], longest);
    if (place) node.append(make("span", { class: "key-join", "aria-hidden": "true" }, " · "));
    node.append(make("bdi", { class: odd ? "key-part odd" : "key-part" }, text));
  });
  return node;
}

/** A key's whole text for the detail view; control signs stay visible, and what is very long is scrolled. */
export function wholeText(value) {
  if (typeof value !== "string") return { text: value === null ? "no value" : JSON.stringify(value), note: "" };
  if (value === "") return { text: "empty text", note: "" };
  return {
    text: value.replace(UNSEEN, (sign) => (sign === "\n" || sign === "\t" ? sign : visible(sign))),
    note: `${value.length.toLocaleString("en")} characters`,
  };
}
