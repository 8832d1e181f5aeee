// Puts the page together.

import { getKey } from "./api.js";
import { setUpChat } from "./chat.js";
import { badge, byId, say } from "./dom.js";
import { keepFeeding, reconnect } from "./feed.js";
import { age } from "./format.js";
import { forgetKey } from "./key.js";
import { setUpLoad } from "./load.js";
import { setUpMemory } from "./memory.js";
import { setUpModels, TONES } from "./models.js";
import { setUpRequests } from "./requests.js";
import { subscribe } from "./state.js";

function showTop({ connection, status }) {
  if (connection !== "live") {
    badge(byId("engine-status"), { connecting: "connecting", locked: "key needed", lost: "not connected" }[connection], "warn");
    return;
  }
  if (!status) return;
  badge(byId("engine-status"), status.engine.status, TONES[status.engine.status]);
  say(byId("model-name"), status.models[0].names[0]);
  say(byId("about"), `${status.version} · up ${age(status.uptime_s)}`);
  document.title = `${status.models[0].names[0]} · Headrace`;
}

function bannerText({ connection, reason, status }) {
  if (connection === "lost") return `Not connected${reason ? `: ${reason}` : ""}. Trying again…`;
  if (connection !== "live" || !status) return "";
  const { status: engine, message, loading } = status.engine;
  const why = message ? `: ${message}` : "";
  if (engine === "starting") return `The model is loading${loading ? ` (${loading.stage})` : ""}.`;
  if (engine === "restarting") return `The worker is being replaced${why}. Requests in flight go on when the next one is ready.`;
  if (engine === "silent") return "The worker shows no sign of life; it is replaced if that lasts.";
  if (engine === "draining") return "The server is shutting down; it takes no new requests.";
  if (engine === "failed") return `The engine has failed${why}. Restart the server.`;
  return "";
}

function showBanner(state) {
  const text = bannerText(state);
  const banner = byId("banner");
  banner.hidden = !text;
  banner.classList.toggle("bad", state.status?.engine.status === "failed");
  say(banner, text);
}

subscribe(showTop);
subscribe(showBanner);
setUpLoad();
setUpRequests();
setUpMemory();
setUpModels();
setUpChat();

byId("key-button").hidden = !getKey();
byId("key-button").addEventListener("click", () => {
  forgetKey();
  reconnect(); // which is refused without a key, and then asks for one
});

keepFeeding();
