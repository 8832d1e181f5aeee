// The chat box: a streamed conversation over /v1/chat/completions.

import { address, call, getKey, serverEvents } from "./api.js";
import { byId, el, say } from "./dom.js";
import { askForKey } from "./key.js";
import { subscribe } from "./state.js";
import { Turn } from "./turn.js";

const NUMBERS = { temperature: "chat-temperature", top_p: "chat-top-p", max_tokens: "chat-max-tokens", seed: "chat-seed" };

let turns = [];
let running = null; // AbortController of the answer under way

export function setUpChat() {
  const input = byId("chat-input");
  byId("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  byId("chat-stop").addEventListener("click", () => running?.abort());
  byId("chat-clear").addEventListener("click", clear);
  byId("chat-curl").addEventListener("click", copyAsCurl);
  byId("curl-close").addEventListener("click", () => byId("curl-dialog").close());
  subscribe((state, changes) => {
    if (changes.status) offerModels(state.status.models);
  });
}

function offerModels(models) {
  const names = models.filter((model) => model.role === "generation").flatMap((model) => model.names);
  const select = byId("chat-model");
  const offered = [...select.options].map((option) => option.value);
  if (names.join("\n") !== offered.join("\n")) select.replaceChildren(...names.map((name) => el("option", {}, name)));
}

/** The body of a request that asks `text` behind the conversation so far. Throws when a parameter makes no sense. */
function body(text) {
  const system = byId("chat-system").value.trim();
  const messages = [
    ...(system ? [{ role: "system", content: system }] : []),
    ...turns.flatMap((turn) => turn.messages()),
    { role: "user", content: text },
  ];
  const made = { model: byId("chat-model").value || undefined, messages, stream: true, stream_options: { include_usage: true } };
  for (const [name, id] of Object.entries(NUMBERS)) {
    const field = byId(id);
    if (field.validity.badInput) throw new Error(`${name} is not a number`);
    if (field.value !== "") made[name] = Number(field.value);
  }
  const tools = byId("chat-tools").value.trim();
  if (tools) {
    try {
      made.tools = JSON.parse(tools);
    } catch {
      throw new Error("the tools are not JSON");
    }
  }
  return made;
}

async function send() {
  const input = byId("chat-input");
  const text = input.value.trim();
  if (!text || running) return;
  const turn = new Turn(text);
  const log = byId("chat-log");
  log.querySelector(".empty")?.remove();
  let request;
  try {
    request = body(text);
  } catch (error) {
    log.append(...turn.elements);
    turn.fail(error.message);
    return;
  }
  log.append(...turn.elements);
  turns.push(turn);
  input.value = "";
  running = new AbortController();
  showRunning(true);
  follow(log, true);
  await receive(turn, request, running.signal);
  running = null;
  showRunning(false);
  say(byId("chat-said"), `The answer has ended: ${turn.finish}.`);
}

async function receive(turn, request, signal) {
  let frame = 0;
  const show = () => {
    frame = 0;
    const log = byId("chat-log");
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    turn.show();
    follow(log, isAtEnd);
  };
  try {
    const response = await call("v1/chat/completions", { method: "POST", body: request, signal });
    for await (const { data } of serverEvents(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      turn.take(chunk);
      frame ||= requestAnimationFrame(show);
    }
    turn.end("ended");
  } catch (error) {
    if (signal.aborted) turn.end("stopped");
    else turn.fail(error.status || error.name !== "TypeError" ? error.message : "the server cannot be reached");
    if (error.status === 401) askForKey();
  }
  cancelAnimationFrame(frame);
  show();
}

function follow(log, isAtEnd) {
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function showRunning(isRunning) {
  const hadFocus = document.activeElement === byId(isRunning ? "chat-send" : "chat-stop");
  byId("chat-send").hidden = isRunning;
  byId("chat-stop").hidden = !isRunning;
  if (hadFocus) byId(isRunning ? "chat-stop" : "chat-input").focus();
}

function clear() {
  running?.abort();
  turns = [];
  byId("chat-log").replaceChildren(el("p", { class: "empty" }, "A new conversation."));
}

// -- as curl

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** The request that Send would make now, or, with nothing typed, the last one again. The key is not in it. */
function curl() {
  const typed = byId("chat-input").value.trim();
  const kept = turns;
  if (!typed) turns = turns.slice(0, -1);
  try {
    const request = body(typed || kept[kept.length - 1]?.text || "Hello");
    const key = getKey() ? ' \\\n  -H "Authorization: Bearer $HEADRACE_API_KEY"' : "";
    const url = quoted(address("v1/chat/completions"));
    return `curl -N ${url} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${quoted(JSON.stringify(request))}`;
  } finally {
    turns = kept;
  }
}

async function copyAsCurl() {
  let text;
  try {
    text = curl();
  } catch (error) {
    say(byId("chat-said"), error.message);
    text = `# ${error.message}`;
  }
  try {
    await navigator.clipboard.writeText(text); // there on HTTPS and on the loopback only
    flash(byId("chat-curl"), "Copied");
  } catch {
    byId("curl-text").value = text;
    byId("curl-dialog").showModal();
    byId("curl-text").select();
  }
}

function flash(button, text) {
  const usual = "Copy as curl";
  say(button, text);
  setTimeout(() => say(button, usual), 1500);
}
