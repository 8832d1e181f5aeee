// Requests to the server this page came from. Addresses are relative to the page, so any path prefix works.

const KEY = "headrace-key";

export const getKey = () => sessionStorage.getItem(KEY);

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const address = (path) => new URL(path, document.baseURI).href;

/** The response, if it is a success; else an ApiError with the server's line. `key`: instead of the kept one. */
export async function call(path, { method = "GET", body, signal, key = getKey() } = {}) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(address(path), {
    method,
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
    credentials: "omit",
    redirect: "error",
  });
  if (!response.ok) throw new ApiError(response.status, await failureLine(response));
  return response;
}

async function failureLine(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

/** Server-sent events of a response: `{event, data}`, comments left out. Closes the connection when left early. */
export async function* serverEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  let event = { event: "message", data: "" };
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (pending + value).split("\n");
      pending = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (event.data) yield event;
          event = { event: "message", data: "" };
        } else if (line.startsWith("event: ")) event.event = line.slice(7);
        else if (line.startsWith("data: ")) event.data += line.slice(6);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
