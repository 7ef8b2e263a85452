// Compares three caches on one question: the answers, memory and time, and which tokens of the text are kept.

import { $, ask, show } from "./api.js";
import { bytes, number, say } from "./slots.js";

const OURS = "spans"; // the library's default
const POLICIES = [
  { name: "full", title: "Full cache" },
  { name: "streaming", title: "StreamingLLM" },
  { name: OURS, title: "SnapStream" },
];
const KEPT = POLICIES.slice(1).reverse(); // the policies whose kept tokens can be shown; ours first
const LEVELS = 5; // shades of a token, by how many heads keep it

let model = null;
let context = null; // the server's context, with the text of each of its tokens
let found = {}; // by policy, the cache report of the last question
let asked = 0; // number of texts and questions so far
let waiting = 0;

export function adapt(served) {
  model = served;
}

export function offer(example) {
  $("compare-example").hidden = false;
  $("compare-example").addEventListener("click", () => {
    $("text").value = example.text;
    $("question").value = example.question;
  });
}

// A new action makes the results and errors of earlier ones obsolete.
async function attempt(work) {
  show(null);
  asked += 1;
  clearTimeout(waiting);
  const mine = asked;
  document.dispatchEvent(new Event("working"));
  try {
    await work(() => mine === asked);
  } catch (error) {
    if (mine !== asked) return;
    show(error.message);
    $("answers").replaceChildren();
  }
}

async function post(path, body) {
  const began = performance.now();
  const reply = await (await ask(path, { method: "POST", body: JSON.stringify(body) })).json();
  return { reply, seconds: (performance.now() - began) / 1000 };
}

async function read(isNewest) {
  const text = $("text").value;
  if (!text.trim()) throw new Error("There is no text: paste one, or choose a file.");
  $("read").disabled = true;
  say($("read-state"), "Reading …");
  try {
    const { reply, seconds } = await post("/v1/contexts", { text, name: "compared on the page" });
    forget();
    context = reply; // deleted when another one replaces it, or the page is closed
    const { texts } = await (await ask(`/v1/contexts/${reply.id}/tokens`)).json();
    context = { ...reply, texts };
    if (!isNewest()) return;
    const left = reply.entries < reply.tokens ? `, of which this server's caches hold ${number.format(reply.entries)}` : "";
    say($("read-state"), `${number.format(reply.tokens)} tokens read in ${seconds.toFixed(1)} s${left}. Now ask.`);
    const most = Math.min(reply.tokens, model.kv_budget);
    $("entries").max = most;
    $("entries").value = Math.max(16, Math.floor(most / 64) * 16);
    $("entries-shown").textContent = number.format($("entries").value);
    $("question-form").hidden = false;
    $("answers").replaceChildren();
    $("kept").hidden = true;
    $("question").focus();
  } catch (error) {
    say($("read-state"), "");
    throw error;
  } finally {
    $("read").disabled = false;
  }
}

// Deletes the context, which is no longer needed.
function forget() {
  if (context) ask(`/v1/contexts/${context.id}`, { method: "DELETE", keepalive: true }).catch(() => {});
  context = null;
}

function request(policy, more) {
  const entries = Number($("entries").value);
  const question = $("question").value;
  const body = {
    context_id: context.id,
    max_tokens: Math.min(Number($("max-tokens").value) || 64, 64),
    temperature: 0,
    return_kept_tokens: "counts",
    kv_budget: policy === "full" ? { capacity: model.kv_budget, policy } : { capacity: entries, policy },
    ...more,
  };
  if (context.chat) return ["/v1/chat/completions", { ...body, messages: [{ role: "user", content: question }] }];
  return ["/v1/completions", { ...body, prompt: ` ${question}` }];
}

// In sequence, so that the times are comparable.
async function compare(isNewest) {
  if (!$("question").value.trim()) throw new Error("There is no question.");
  found = {};
  $("answers").replaceChildren(...POLICIES.map(({ title }) => card(title, "…", "")));
  for (const { name, title } of POLICIES) {
    const { reply, seconds } = await post(...request(name));
    if (!isNewest()) return; // the budget has changed, or something else is asked
    const choice = reply.choices[0];
    const answer = (choice.message?.content ?? choice.text).trim() || "(nothing)";
    const { cache } = choice;
    const kept = cache.prompt_tokens - cache.dropped;
    const full = cache.bytes_full;
    const held = Math.min(cache.bytes_held, full);
    const figures = [
      `${number.format(kept)} of ${number.format(cache.prompt_tokens)} tokens kept`,
      `${bytes(held)} of memory, ${Math.round((100 * held) / full)} % of a full cache's`,
      `${seconds.toFixed(2)} s`,
    ];
    const at = POLICIES.findIndex((policy) => policy.name === name);
    $("answers").children[at].replaceWith(card(title, answer, figures.join("; ")));
  }
  // Kept positions are requested separately: they are long, and would affect the times.
  for (const { name } of KEPT) {
    const { reply } = await post(...request(name, { return_kept_tokens: true, max_tokens: 1 }));
    if (!isNewest()) return;
    found[name] = reply.choices[0].cache;
  }
  layers();
  mark();
}

function card(title, answer, figures) {
  const item = document.createElement("li");
  const parts = [["h3", title], ["p", answer], ["p", figures]].map(([name, text]) => {
    const made = document.createElement(name);
    made.textContent = text;
    return made;
  });
  parts[1].className = "answer";
  parts[2].className = "quiet";
  item.append(...parts);
  return item;
}

function layers() {
  const count = found[OURS].kept.positions.length;
  if ($("kept-layer").options.length === count + 1) return;
  const options = ["all layers", ...Array.from({ length: count }, (_, layer) => `layer ${layer + 1}`)];
  $("kept-layer").replaceChildren(...options.map((text, index) => new Option(text, index - 1)));
}

// Marks each token of the text; the more heads keep it, the darker.
function mark() {
  const kept = found[$("kept-policy").value]?.kept;
  if (!kept) return;
  const layer = Number($("kept-layer").value);
  const chosen = layer < 0 ? kept.positions : [kept.positions[layer]];
  const counts = new Uint32Array(context.tokens);
  let heads = 0;
  for (const one of chosen) {
    for (const head of one) {
      heads += 1;
      for (const position of head) if (position < counts.length) counts[position] += 1;
    }
  }
  const most = counts.reduce((largest, count) => Math.max(largest, count), 1);
  const pieces = [];
  let text = "";
  let before = -1;
  const end = () => {
    if (!text) return;
    const piece = document.createElement("span");
    piece.className = `kept-${before}`;
    piece.textContent = text;
    pieces.push(piece);
  };
  context.texts.forEach((one, index) => {
    const level = counts[index] ? Math.ceil(((LEVELS - 1) * counts[index]) / most) : 0;
    if (level !== before) {
      end();
      text = "";
      before = level;
    }
    text += one;
  });
  end();
  $("document").replaceChildren(...pieces);
  const share = counts.reduce((sum, count) => sum + count, 0) / (heads * counts.length);
  say($("kept-share"), `${(100 * share).toFixed(0)} % of the text's tokens; the darker a word, the more heads keep it`);
  $("kept").hidden = false;
}

$("read-form").addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(read);
});
$("question-form").addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(compare);
});
$("file").addEventListener("change", async () => {
  const [file] = $("file").files;
  if (file) $("text").value = await file.text();
});
$("entries").addEventListener("input", () => {
  $("entries-shown").textContent = number.format($("entries").value);
  // Ask again once the slider rests. This is fast, because the text is already prefilled.
  clearTimeout(waiting);
  if ($("answers").childElementCount) waiting = setTimeout(() => attempt(compare), 300);
});
window.addEventListener("pagehide", forget);
$("kept-policy").replaceChildren(...KEPT.map(({ name, title }) => new Option(title, name)));
$("kept-policy").addEventListener("change", mark);
$("kept-layer").addEventListener("change", mark);
