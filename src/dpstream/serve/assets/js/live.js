// Releases as they come. When the server goes away the page says so, tries again, and catches up.
import { byId, write } from "./dom.js";

const FIRST_WAIT = 500;
const LONGEST_WAIT = 8000;

/** Show the state of the connection in the page's head. */
export function status(state, text) {
  const before = byId("status").dataset.state;
  byId("status").dataset.state = state;
  write(byId("status-text"), text);
  // Read out when the connection goes or comes back, not at every release.
  if (state !== before) write(byId("said"), state === "live" ? "Connected" : text);
}

/**
 * Listen for ever: `onRelease(event)` for each release, `onOpen()` whenever the stream (re)opens.
 * The browser's own retry gives up on some failures, so the waiting is done here.
 */
export function listen({ onRelease, onOpen }) {
  let wait = FIRST_WAIT;
  let source = null;
  let timer = null;

  const open = () => {
    timer = null;
    source = new EventSource("api/events");
    source.addEventListener("open", () => {
      wait = FIRST_WAIT;
      onOpen();
    });
    source.addEventListener("release", (message) => {
      try {
        onRelease(JSON.parse(message.data));
      } catch {
        onRelease({}); // an event that cannot be read still says that there is something new
      }
    });
    source.addEventListener("error", () => lost());
  };

  const lost = () => {
    source?.close();
    if (timer) return;
    status("lost", "Reconnecting…");
    timer = setTimeout(open, wait);
    wait = Math.min(LONGEST_WAIT, wait * 2);
  };

  const now = () => {
    if (!timer) return;
    clearTimeout(timer);
    open();
  };
  addEventListener("online", now);
  document.addEventListener("visibilitychange", () => document.hidden || now());
  addEventListener("pagehide", () => source?.close());
  open();
}
