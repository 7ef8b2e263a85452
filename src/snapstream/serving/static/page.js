// The chat, and the loop that polls the state of the caches.

import { $, ask, events, show } from "./api.js";
import { adapt, offer } from "./compare.js";
import { Answer, bubble } from "./messages.js";
import { shapes, system } from "./shapes.js";
import { bytes, draw, number, say } from "./slots.js";

const POLL_BUSY = 250;
const POLL_IDLE = 2000;

let model = null;
let history = [];
let session = newSession();
let running = null;
let timer = 0;
let watching = false;
let again = false;

function newSession() {
  return `page-${crypto.getRandomValues(new Uint32Array(3)).join("-")}`;
}

// Brings the first setting that the server would refuse into view, and returns what is wrong with it.
function refusedSetting() {
  const wrong = [...$("settings").querySelectorAll("input")].find((input) => !input.checkValidity());
  if (!wrong) return null;
  $("settings").open = true;
  wrong.focus();
  return `${wrong.labels[0].firstChild.textContent.trim()}: ${wrong.validationMessage}`;
}

// Whether settings, tools and schema are valid; if not, says why.
function canSend() {
  let problem = refusedSetting();
  try {
    if (!problem && model.chat_template) shapes();
  } catch (error) {
    problem = error.message;
  }
  show(problem);
  return !problem;
}

function request() {
  const budget = Number($("budget").value);
  const body = {
    model: model.id,
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: Number($("max-tokens").value) || 256,
    temperature: Number($("temperature").value) || 0,
    ...(budget ? { kv_budget: budget } : {}),
    ...($("session").checked ? { session_id: session } : {}),
  };
  if (model.chat_template) {
    return ["/v1/chat/completions", { ...body, ...shapes(), messages: [...system(), ...history] }];
  }
  // Without a chat template, the conversation is one continued text; an answer follows its question directly.
  const turns = history.map(({ role, content }, index) => (role === "user" && index ? `\n${content}` : content));
  return ["/v1/completions", { ...body, prompt: turns.join("") }];
}

async function send() {
  const text = $("input").value.replace(/\s+$/, "");
  if (!text || running || !model) return;
  if (!canSend()) return;
  $("input").value = "";
  const conversation = history;
  // Calls may stay without results.
  const results = $("messages").querySelector(".results");
  const place = results?.parentElement;
  results?.remove();
  const asked = bubble("user", text);
  history.push({ role: "user", content: text });
  // Without an answer, the turn is taken back, so that it can be tried again.
  await respond(() => {
    conversation.pop();
    asked.remove();
    place?.append(results);
    $("input").value ||= text;
    $("input").focus();
  });
}

async function sendResults(results, answer) {
  if (!canSend()) {
    answer.askForResults((again) => sendResults(again, answer), results);
    return;
  }
  const conversation = history;
  const shown = results.map(({ content }) => bubble("tool", content));
  history.push(...results);
  await respond(() => {
    conversation.splice(-results.length);
    for (const item of shown) item.remove();
    answer.askForResults((again) => sendResults(again, answer), results);
  });
}

// Streams the next answer; without one, takes back what was asked.
async function respond(takeBack) {
  const conversation = history;
  const answer = new Answer();
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  say($("figures"), "Reading the prompt …");
  soon();

  const began = performance.now();
  const seen = { first: null, last: null, usage: null, session: null, finish: null };
  try {
    const [path, body] = request();
    const response = await ask(path, { method: "POST", body: JSON.stringify(body), signal: running.signal });
    for await (const event of events(response)) {
      const choice = event.choices[0];
      if (answer.add(choice)) {
        seen.last = performance.now();
        seen.first ??= seen.last;
      }
      seen.finish ??= choice?.finish_reason ?? null;
      seen.usage = event.usage ?? seen.usage;
      seen.session = event.session ?? seen.session;
    }
    if (!seen.finish) throw new Error("the connection ended before the answer did");
  } catch (error) {
    if (error.name === "AbortError") seen.finish = "stopped";
    else if (conversation === history) show(error.message);
  }
  running = null;
  $("send").disabled = false;
  $("stop").disabled = true;
  soon();
  if (conversation !== history) return; // a new one has begun meanwhile
  say($("figures"), figures(seen, began));
  const isStopped = !seen.finish || seen.finish === "stopped";
  if (answer.text || !isStopped) {
    if (seen.finish !== "tool_calls") answer.dropCalls(); // a call that was cut off cannot be answered
    conversation.push(answer.message());
    if (answer.calls.length) answer.askForResults((results) => sendResults(results, answer));
    else $("input").focus();
  } else {
    answer.item.remove();
    takeBack();
  }
}

function figures(seen, began) {
  if (seen.finish === "stopped") return "Stopped.";
  if (!seen.usage) return "";
  const { prompt_tokens: read, completion_tokens: made } = seen.usage;
  const parts = [`${read.toLocaleString("en")} tokens of prompt, ${made} generated`];
  if (seen.first !== null) parts.push(`first text after ${((seen.first - began) / 1000).toFixed(2)} s`);
  if (made > 1 && seen.last > seen.first) parts.push(`${((1000 * (made - 1)) / (seen.last - seen.first)).toFixed(1)} tokens/s`);
  if (seen.finish === "length") parts.push("truncated at the token limit");
  if (seen.session?.reused_tokens) parts.push(`continued from the cache, prefilled only ${seen.session.read_tokens}`);
  return `${parts.join("; ")}.`;
}

function restart() {
  running?.abort();
  history = [];
  session = newSession();
  $("messages").replaceChildren();
  show(null);
  say($("figures"), "New conversation.");
  $("input").focus();
}

async function connect() {
  try {
    model = (await (await ask("/v1/models")).json()).data[0];
    const length = model.max_model_len.toLocaleString("en");
    $("budget").max = model.kv_budget;
    $("budget").placeholder = `the server's, ${number.format(model.kv_budget)}`;
    $("max-tokens").max = model.max_model_len;
    $("shapes").hidden = !model.chat_template;
    say($("server"), `${model.id}: up to ${length} tokens in a cache of ${model.kv_budget.toLocaleString("en")} entries`);
    show(null);
    adapt(model);
    return true;
  } catch (error) {
    // This is polled: without the request's id the text stays the same, so a screen reader reads it once.
    show(error.message.replace(/ \[request .*\]$/, ""));
    return false;
  }
}

async function watch() {
  let wait = POLL_IDLE;
  watching = true;
  if (!document.hidden && (model || (await connect()))) {
    try {
      const state = await (await ask("/v1/cache")).json();
      draw(state);
      if (running || state.reading || state.slots.some((slot) => slot.busy)) wait = POLL_BUSY;
      const memory = Object.values(state.memory).reduce((sum, size) => sum + size, 0);
      $("totals").title = `The engine's memory: ${bytes(memory)}`;
    } catch {
      say($("totals"), "The server cannot be reached.");
    }
  }
  timer = setTimeout(watch, again ? 0 : wait);
  watching = again = false;
}

// Poll again immediately, without starting a second loop.
function soon() {
  if (watching) {
    again = true;
    return;
  }
  clearTimeout(timer);
  timer = setTimeout(watch, 0);
}

async function offerExample() {
  const response = await fetch("/page/example.json");
  if (response.status !== 200) return; // there is no example
  const example = await response.json();
  $("example").hidden = false;
  $("note").hidden = !example.note;
  $("note").textContent = example.note;
  offer(example);
  $("example").addEventListener("click", () => {
    $("input").value = `${example.text} ${example.question}`;
    $("input").focus();
  });
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("fresh").addEventListener("click", restart);
$("key").addEventListener("change", connect);

for (const view of ["chat", "compare"]) {
  $(`show-${view}`).addEventListener("click", () => {
    for (const other of ["chat", "compare"]) {
      $(`${other}-view`).hidden = other !== view;
      $(`show-${other}`).setAttribute("aria-pressed", String(other === view));
    }
    show(null);
  });
}
document.addEventListener("working", soon); // the other view has sent a request

offerExample();
watch();
