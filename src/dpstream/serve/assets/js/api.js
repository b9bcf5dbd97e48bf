// The feed, as this page uses it. A later question of the same kind calls off an earlier one.

/** The feed refused, in its own words. */
export class Refused extends Error {
  constructor(status, words) {
    super(words);
    this.status = status;
  }
}

const running = new Map();

async function get(path, parameters = {}, kind = null) {
  const asked = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") asked.append(name, each);
    }
  }
  const control = new AbortController();
  if (kind) {
    running.get(kind)?.abort();
    running.set(kind, control);
  }
  const text = asked.toString();
  const answer = await fetch(text ? `${path}?${text}` : path, {
    headers: { Accept: "application/json" },
    signal: control.signal,
  });
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, said.error ?? `the server answered ${answer.status}`);
  }
  return answer.json();
}

const of = (name) => `api/queries/${encodeURIComponent(name)}`;

export const queries = async () => (await get("api/queries", {}, "queries")).queries;
export const windows = (name, after) => get(`${of(name)}/windows`, { limit: 100, after }, "windows");
export const latest = (name, parameters) => get(`${of(name)}/latest`, parameters, "latest");
export const top = (name, parameters) => get(`${of(name)}/latest`, parameters, "top");
export const series = (name, parameters) => get(`${of(name)}/series`, parameters, "series");
export const picture = (name, parameters) => get(`${of(name)}/latest`, parameters, "picture");
export const cells = (name, parameters) => get(`${of(name)}/series`, parameters);
export const before = (name, parameters) => get(`${of(name)}/series`, parameters, "before");
export const watched = (name, parameters) => get(`${of(name)}/series`, parameters);
export const wholeKey = (name, id) => get(`${of(name)}/keys/${encodeURIComponent(id)}`, {}, "key");
export const ledger = () => get("api/ledger", {}, "ledger");
export const whatIf = (parameters) => get("api/what-if", parameters, "what-if");
export const download = (name, format, window) => `${of(name)}/download?${new URLSearchParams({ format, window })}`;

/** A question that was called off by a later one is no failure. */
export const calledOff = (problem) => problem?.name === "AbortError";
