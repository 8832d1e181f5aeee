// Asks for the API key when the server wants one, and keeps it for this tab.

import { call, getKey, setKey } from "./api.js";
import { byId, say } from "./dom.js";

let asking = null; // promise while the dialog is open

/** Resolves when the server has accepted a key. One dialog, however many ask. */
export function askForKey() {
  asking ??= ask().finally(() => (asking = null));
  return asking;
}

export function forgetKey() {
  setKey(null);
}

async function ask() {
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  say(byId("key-error"), getKey() ? "The key in use is not known to the server any more." : "");
  setKey(null);
  input.value = "";
  byId("key-button").hidden = false;
  if (!dialog.open) dialog.showModal();
  input.focus();
  while (!(await accepted(await submitted()))) input.select();
  dialog.close();
}

/** The key that is typed next. A dialog closed without one is opened again: nothing works without. */
function submitted() {
  const dialog = byId("key-dialog");
  const form = byId("key-form");
  return new Promise((resolve) => {
    const reopen = () => dialog.showModal();
    dialog.addEventListener("close", reopen);
    form.addEventListener(
      "submit",
      (event) => {
        event.preventDefault();
        dialog.removeEventListener("close", reopen);
        resolve(byId("key-input").value.trim());
      },
      { once: true },
    );
  });
}

async function accepted(key) {
  const button = byId("key-submit");
  button.disabled = true;
  try {
    await call("v1/models", { key });
    setKey(key);
    return true;
  } catch (error) {
    say(byId("key-error"), error.status === 401 ? "The server does not know this key." : `It cannot be checked: ${error.message}`);
    return false;
  } finally {
    button.disabled = false;
  }
}
