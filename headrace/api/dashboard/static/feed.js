// Keeps a status stream open while somebody can see the page, and puts what it brings into the state.

import { call, serverEvents } from "./api.js";
import { askForKey } from "./key.js";
import { merged, state, update } from "./state.js";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8000;
const HIDDEN_MS = 20000;

const NONE = { total: 0, own_only: true, requests: [] };

let current = null; // AbortController of the open stream

export async function keepFeeding() {
  document.addEventListener("visibilitychange", onVisibility);
  let wait = FIRST_WAIT_MS;
  for (;;) {
    await visible();
    current = new AbortController();
    try {
      await follow(current.signal);
      wait = FIRST_WAIT_MS;
    } catch (error) {
      if (error.status === 401) {
        update({ connection: "locked", requests: NONE });
        await askForKey();
        continue;
      }
      if (!current.signal.aborted) update({ connection: "lost", reason: error.status ? error.message : "" });
      if (state.connection === "live") wait = FIRST_WAIT_MS;
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(LONGEST_WAIT_MS, wait * 2);
  }
}

/** Begin anew, with another key perhaps. */
export function reconnect() {
  current?.abort();
}

async function follow(signal) {
  const response = await call("v1/status/events", { signal });
  for await (const { event, data } of serverEvents(response)) {
    const body = JSON.parse(data);
    if (event === "history") update({ connection: "live", points: merged(state.points, body.points) });
    else if (event === "status") update({ status: body, points: merged(state.points, [body.point]) });
    else if (event === "requests") update({ requests: body });
  }
  update({ connection: "lost", reason: "" });
}

let hiding = 0;

function onVisibility() {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(reconnect, HIDDEN_MS);
}

function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}
