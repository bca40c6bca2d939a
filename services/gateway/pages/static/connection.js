// Requests to this gateway. An API key is asked for when the gateway wants one, and kept until the tab is closed.

import { byId, el } from "./dom.js";

const KEY = "paceline-api-key";

export class ApiError extends Error {}

// {version, requires_key, demo}
export async function pageSettings() {
  const response = await fetch("/pages/settings.json");
  if (!response.ok) throw new ApiError(`the gateway answered ${response.status}`);
  return response.json();
}

// Ask for a key unless there is one. Call it before the first request, if the gateway requires keys.
export async function requireKey() {
  const button = byId("forget-key");
  button.hidden = false;
  button.addEventListener("click", () => {
    sessionStorage.removeItem(KEY);
    location.reload();
  });
  if (!sessionStorage.getItem(KEY)) await askForKey("This gateway asks for an API key.");
}

// The JSON of a response. Raises ApiError with the gateway's own words.
export async function requestJson(path, options = {}) {
  return (await request(path, options)).json();
}

// The objects of an event stream as they come, until [DONE]. `signal` aborts it.
export async function* requestStream(path, body, signal) {
  const headers = { "content-type": "application/json" };
  const response = await request(path, { method: "POST", body: JSON.stringify(body), signal, headers });
  for await (const line of lines(response.body)) {
    if (line === "data: [DONE]") return;
    if (!line.startsWith("data: ")) continue;
    const object = JSON.parse(line.slice("data: ".length));
    if (object.error) throw new ApiError(object.error.message);
    yield object;
  }
}

async function request(path, options) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.ok) return response;
    const message = await errorMessage(response);
    if (response.status !== 401) throw new ApiError(message);
    await askForKey(`Refused: ${message}.`);
  }
}

async function errorMessage(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the gateway answered ${response.status}`;
  }
}

async function* lines(stream) {
  const decoder = new TextDecoder();
  const reader = stream.getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = parts.pop();
      yield* parts;
    }
  } finally {
    reader.cancel().catch(() => {}); // after an abort it has ended already
  }
}

let asking = null;

// One dialog, however many requests wait for it.
function askForKey(why) {
  asking ??= keyDialog(why).finally(() => {
    asking = null;
  });
  return asking;
}

function keyDialog(why) {
  const input = el("input", { id: "api-key", type: "password", autocomplete: "off", required: true });
  const form = el(
    "form",
    { method: "dialog" },
    el("h2", {}, "API key"),
    el("p", { id: "key-why" }, why),
    el("label", { for: "api-key" }, "Key"),
    input,
    el("p", { class: "hint" }, "It stays in this tab and goes to this gateway alone."),
    el("button", { class: "primary" }, "Use key"),
  );
  const dialog = el("dialog", { class: "panel", "aria-describedby": "key-why" }, form);
  dialog.addEventListener("cancel", (event) => event.preventDefault()); // there is nothing to see without a key
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, input.value.trim());
      dialog.remove();
      resolve();
    });
  });
}
