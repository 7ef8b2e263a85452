// Requests to the server, for both views, and the display of errors.

import { say } from "./slots.js";

export const $ = (id) => document.getElementById(id);
let askedFor = null; // the key that was sent when the server last refused it

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

export async function ask(path, options = {}) {
  const response = await fetch(path, { headers: headers(), ...options });
  if (!response.ok) throw new Error(await problem(response));
  return response;
}

// The message of an error in one line, with the request's id in the server's log.
async function problem(response) {
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not one of the server's own errors
  }
  if (response.status === 401) message = askForKey();
  return `${message} [request ${response.headers.get("X-Request-Id") ?? "unknown"}]`;
}

// Users cannot set headers in a browser: say where to enter the key, and move the focus there.
function askForKey() {
  if (askedFor !== $("key").value) {
    // Only once per key: the page polls the server, and must not take the focus from the user each time.
    askedFor = $("key").value;
    if ($("chat-view").hidden) $("show-chat").click();
    $("settings").open = true;
    $("key").focus();
  }
  say($("server"), "An API key is needed");
  return $("key").value ? "The server does not know this API key: see Settings." : "This server needs an API key: enter it in Settings.";
}

export function show(error) {
  $("error").hidden = !error;
  say($("error"), error ?? "");
}

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith(":")) continue; // a comment that keeps the connection open
      const data = line.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(`${event.error.message} [request ${event.error.request_id}]`);
      yield event;
    }
  }
}
