// Draws the state from /v1/cache: one card per slot.

const SVG = "http://www.w3.org/2000/svg";
export const number = new Intl.NumberFormat("en");

export function bytes(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${size.toFixed(unit && size < 100 ? 1 : 0)} ${units[unit]}`;
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

function drawing(label, width, parts, className) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} 10`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  if (className) svg.setAttribute("class", className);
  for (const part of parts) {
    const rect = document.createElementNS(SVG, "rect");
    for (const [name, value] of Object.entries({ y: 0, height: 10, ...part })) rect.setAttribute(name, value);
    svg.append(rect);
  }
  return svg;
}

function many(count, one) {
  return `${number.format(count)} ${one}${count === 1 ? "" : "s"}`;
}

// The entries of a cache from left to right, and where the next token goes. The width is proportional to its size.
function cache(slot, capacity) {
  const base = slot.sink + slot.pinned;
  const ring = Math.max(slot.held - base, 0);
  const mark = Math.max(slot.limit / 250, 1);
  const svg = drawing(
    `${slot.held} of ${slot.limit} entries in use: ${slot.sink} sinks, ${slot.pinned} pinned, ${ring} in the ring; ` +
      `the next token goes to entry ${slot.next_entry}`,
    slot.limit,
    [
      { x: 0, width: slot.limit, class: "empty" },
      { x: 0, width: slot.sink, class: "sink" },
      { x: slot.sink, width: slot.pinned, class: "pinned" },
      { x: base, width: ring, class: "ring" },
      { x: Math.min(slot.next_entry, slot.limit - mark), width: mark, class: "next" },
    ],
  );
  // Not a style attribute, which the page's policy forbids.
  svg.setAttribute("width", `${Math.max(Math.min(100 * (slot.limit / capacity), 100), 2).toFixed(2)}%`);
  return svg;
}

// The prompt from its first to its last token; the darker a part, the more of it was kept.
function prompt(slot) {
  const kept = slot.kept.map((share, index) => ({ x: index, width: 1, class: "kept", "fill-opacity": Math.sqrt(share).toFixed(3) }));
  const mean = slot.kept.reduce((sum, share) => sum + share, 0) / Math.max(slot.kept.length, 1);
  const tokens = Math.max(slot.seen - slot.generated, 1);
  const pins = slot.pin.map(([start, end]) => ({
    x: (start / tokens) * kept.length,
    width: ((Math.min(end, tokens) - start) / tokens) * kept.length,
    y: 8,
    height: 2,
    class: "pin",
  }));
  let pinned = 0;
  let last = 0; // spans may overlap
  for (const [start, end] of slot.pin.toSorted((one, other) => one[0] - other[0])) {
    pinned += Math.max(end - Math.max(start, last), 0);
    last = Math.max(last, end);
  }
  return drawing(
    `of the prompt, ${Math.round(100 * mean)} % was kept` + (pinned ? `; what is pinned is underlined: ${many(pinned, "token")}` : ""),
    slot.kept.length || 1,
    [{ x: 0, width: slot.kept.length, class: "empty" }, ...kept, ...pins],
    "strip",
  );
}

// The cache's memory, compared with what a full cache would take by now.
function memory(slot) {
  const label = `${bytes(slot.bytes_held)} of memory; a full cache would take ${bytes(slot.bytes_full)} by now`;
  const whole = Math.max(slot.bytes_full, slot.bytes_held);
  const held = slot.bytes_held / whole;
  const parts = [{ x: 0, width: slot.bytes_full / whole, class: "empty" }, { x: 0, width: held, class: "memory" }];
  const figure = element("p", "", label);
  return [drawing(label, 1, parts, "strip"), figure];
}

function card(slot, capacity) {
  const item = element("li", slot.busy ? "slot" : "slot idle");
  item.append(
    element("h3", "", `Slot ${slot.slot}: ${slot.busy ? "decoding" : "free (last use)"}`),
    cache(slot, capacity),
    prompt(slot),
    element(
      "p",
      "",
      `${many(slot.seen, "token")} seen, ${number.format(slot.generated)} of them generated; ` +
        `${number.format(slot.held)} of ${number.format(slot.limit)} entries in use`,
    ),
    ...memory(slot),
  );
  return item;
}

// Free slots take one line; opening it shows the state after their last use.
function fold(free, capacity) {
  const used = free.filter((slot) => slot.limit);
  const place = document.getElementById("free");
  place.hidden = !free.length;
  say(
    document.getElementById("free-count"),
    `${many(free.length, "slot")} free${used.length ? `, ${number.format(used.length)} of them used before` : ""}`,
  );
  document.getElementById("free-slots").replaceChildren(...used.map((slot) => card(slot, capacity)));
}

let before = { time: 0, generated: new Map() };

// Tokens per second of all slots since the last call; null if no request was running both times.
function speed(busy) {
  const now = { time: performance.now(), generated: new Map(busy.map((slot) => [slot.request_id, slot.generated])) };
  let made = null;
  for (const [name, generated] of now.generated) {
    if (before.generated.has(name)) made = (made ?? 0) + generated - before.generated.get(name);
  }
  const seconds = (now.time - before.time) / 1000;
  before = now;
  return made === null ? null : made / seconds;
}

export function draw(state) {
  const busy = state.slots.filter((slot) => slot.busy);
  const held = busy.reduce((sum, slot) => sum + slot.bytes_held, 0);
  const full = busy.reduce((sum, slot) => sum + slot.bytes_full, 0);
  const totals = [`${busy.length} of ${state.slots.length} slots busy, ${state.waiting} waiting`];
  const tokens = speed(busy);
  if (tokens !== null) totals.push(`${number.format(Math.round(tokens))} tokens/s`);
  if (busy.length) totals.push(`caches take ${bytes(held)}, full ones would take ${bytes(full)}`);
  if (state.sessions) {
    const verb = state.sessions === 1 ? "takes" : "take";
    totals.push(`${many(state.sessions, "kept conversation")} ${verb} ${bytes(state.session_bytes)}`);
  }
  say(document.getElementById("totals"), `${totals.join("; ")}.`);

  const reading = document.getElementById("reading");
  reading.hidden = !state.reading;
  if (state.reading) {
    const { read, of } = state.reading;
    document.getElementById("progress").value = of ? read / of : 0;
    document.getElementById("progress-text").textContent = `${number.format(read)} of ${number.format(of)} tokens`;
  }
  document.getElementById("slots").replaceChildren(...busy.map((slot) => card(slot, state.capacity)));
  fold(state.slots.filter((slot) => !slot.busy), state.capacity);
}

// Screen readers read a status region when it is set, so set it only if the text changes.
export function say(place, text) {
  if (place.textContent !== text) place.textContent = text;
}
