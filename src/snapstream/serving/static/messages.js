// The messages of the conversation on the page: text, reasoning, calls of tools, and their results.

import { $ } from "./api.js";
import { number } from "./slots.js";

const LONG = 800; // characters; longer messages are folded

function make(name, className, text) {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

export function toEnd() {
  $("messages").scrollTop = $("messages").scrollHeight;
}

export function bubble(role, text) {
  $("hint")?.remove();
  const item = make("div", `message ${role}`, "");
  const body = make("span", "body", text);
  item.append(make("span", "who", { user: "You", assistant: "Model", tool: "Result" }[role]), body);
  if (text.length > LONG) fold(item, body, text.length);
  $("messages").append(item);
  body.scrollTop = body.scrollHeight; // the question is at the end
  toEnd();
  return item;
}

// A long text shows only its end, where the question is, and says so.
function fold(item, body, length) {
  const note = make("span", "fold", "");
  const toggle = make("button", "", "");
  toggle.type = "button";
  const set = (folded) => {
    body.classList.toggle("long", folded);
    body.tabIndex = folded ? 0 : -1;
    toggle.textContent = folded ? "Show all" : "Show the end";
    toggle.setAttribute("aria-expanded", String(!folded));
    note.firstChild.textContent = folded ? `${number.format(length)} characters, of which the end is shown ` : "";
    body.scrollTop = body.scrollHeight;
  };
  note.append("", toggle);
  item.insertBefore(note, body);
  toggle.addEventListener("click", () => set(!body.classList.contains("long")));
  set(true);
}

// An answer of the model, as it streams in.
export class Answer {
  constructor() {
    this.item = bubble("assistant", "");
    this.body = this.item.querySelector(".body");
    this.text = "";
    this.calls = [];
    this.reasoning = null;
  }

  // Adds what an event brings; returns whether it brings anything.
  add(choice) {
    const delta = choice?.delta ?? { content: choice?.text };
    if (delta.reasoning_content) this.think(delta.reasoning_content);
    if (delta.content) {
      this.text += delta.content;
      // Append rather than replace, so that a screen reader reads only the new text.
      this.body.append(this.body.textContent ? delta.content : delta.content.trimStart());
    }
    for (const part of delta.tool_calls ?? []) this.call(part);
    const brings = Boolean(delta.content || delta.reasoning_content || delta.tool_calls?.length);
    if (brings) toEnd();
    return brings;
  }

  // The reasoning is folded; its length shows that it goes on.
  think(piece) {
    if (!this.reasoning) {
      const details = make("details", "reasoning", "");
      details.setAttribute("aria-live", "off"); // it changes with every token
      this.reasoning = { summary: make("summary", "", ""), text: make("span", "body", "") };
      details.append(this.reasoning.summary, this.reasoning.text);
      this.item.insertBefore(details, this.body);
    }
    const { summary, text } = this.reasoning;
    text.append(piece);
    summary.textContent = `Reasoning, ${number.format(text.textContent.length)} characters`;
  }

  call({ index, id, function: { name, arguments: piece } }) {
    if (!this.calls[index]) {
      this.calls[index] = { id, name: name ?? "", arguments: "", shown: make("code", "call", `${name} `) };
      this.item.append(this.calls[index].shown);
    }
    const call = this.calls[index];
    call.arguments += piece ?? "";
    call.shown.append(piece ?? "");
  }

  dropCalls() {
    for (const { shown } of this.calls) shown.remove();
    this.calls = [];
  }

  // The answer in the form of the API, for the next request.
  message() {
    const calls = this.calls.map(({ id, name, arguments: given }) => ({
      id,
      type: "function",
      function: { name, arguments: given },
    }));
    const thought = this.reasoning?.text.textContent;
    return {
      role: "assistant",
      content: this.text,
      ...(thought ? { reasoning_content: thought } : {}),
      ...(calls.length ? { tool_calls: calls } : {}),
    };
  }

  // Asks for the results of the calls, and hands them on as messages; they may have been given before.
  askForResults(done, before = []) {
    const form = make("form", "results", "");
    const boxes = this.calls.map(({ name }, index) => {
      const label = make("label", "", `Result of ${name}`);
      const box = document.createElement("textarea");
      box.rows = 2;
      box.value = before[index]?.content ?? "";
      label.append(box);
      form.append(label);
      return box;
    });
    const send = make("button", "", "Send results");
    send.type = "submit";
    form.append(send);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      form.remove();
      done(boxes.map((box, index) => ({ role: "tool", tool_call_id: this.calls[index].id, content: box.value.trim() || "(nothing)" })));
    });
    this.item.append(form);
    toEnd();
    boxes[0].focus();
  }
}
