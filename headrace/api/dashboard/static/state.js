// What the page knows. Modules subscribe and draw what changed.

/** Points older than this, against the newest one, are dropped. */
export const HISTORY_S = 300;

export const state = {
  connection: "connecting", // "live", "locked", or "lost" with a reason
  reason: "",
  status: null, // the newest `status` event
  requests: null, // the newest `requests` event
  points: [], // oldest first
};

const listeners = [];

/** `listener(state, changes)` is called after every change. */
export function subscribe(listener) {
  listeners.push(listener);
}

export function update(changes) {
  Object.assign(state, changes);
  for (const listener of listeners) listener(state, changes);
}

/** Points in order of time, each time once, no older than `HISTORY_S`. */
export function merged(old, more) {
  const byTime = new Map([...old, ...more].map((point) => [point.at, point]));
  const all = [...byTime.values()].sort((a, b) => a.at - b.at);
  const newest = all.length ? all[all.length - 1].at : 0;
  return all.filter((point) => newest - point.at <= HISTORY_S);
}
