// Small helpers. Text enters the page as text nodes only: nothing here parses markup.

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** An element with properties and children; `class`, `data-*`, `aria-*` and `role` become attributes. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name === "class") element.className = value;
    else if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Write text only where it changed, so that nothing is repainted or announced again. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Make a list's children match `items` by key: nodes that stay are kept and moved, so that focus,
 * scroll position and transitions survive an update.
 */
export function reconcile(list, items, { keyOf, create, update }) {
  const known = new Map([...list.children].map((node) => [node.dataset.of, node]));
  let place = list.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let node = known.get(key);
    if (node) known.delete(key);
    else {
      node = create(item);
      node.dataset.of = key;
    }
    if (node === place) place = place.nextElementSibling;
    else list.insertBefore(node, place);
    update(node, item);
  }
  for (const node of known.values()) node.remove();
}

/**
 * Call `action` at most once every `milliseconds`, never twice at the same time, and once more after
 * the last call: a stream of calls that does not pause still gets through.
 */
export function paced(action, milliseconds) {
  let [waiting, running, again] = [false, false, false];
  const run = async () => {
    [waiting, running, again] = [false, true, false];
    try {
      await action();
    } finally {
      running = false;
      if (again) call();
    }
  };
  const call = () => {
    if (running) again = true;
    else if (!waiting) {
      waiting = true;
      setTimeout(run, milliseconds);
    }
  };
  return call;
}

/** Call `action` once things have been quiet for `milliseconds`. */
export function debounce(action, milliseconds) {
  let timer;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...given), milliseconds);
  };
}
