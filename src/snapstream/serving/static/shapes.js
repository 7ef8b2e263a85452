// What a conversation has besides its messages: a system message, tools, and the schema of answers.

import { $ } from "./api.js";

const TOOL = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather of a city.",
      parameters: {
        type: "object",
        properties: {
          city: { type: "string", description: "Name of the city" },
          unit: { type: "string", enum: ["celsius", "fahrenheit"] },
        },
        required: ["city", "unit"],
      },
    },
  },
];
const SCHEMA = {
  type: "object",
  properties: { city: { type: "string", maxLength: 40 }, population: { type: "integer" }, capital: { type: "boolean" } },
  required: ["city", "population", "capital"],
};

// Reads a box with JSON; null if it is empty.
function parsed(id) {
  const text = $(id).value.trim();
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    $("shapes").open = true;
    $(id).focus();
    throw new Error(`${$(id).labels[0].textContent}: ${error.message}`);
  }
}

// Fields of a request. Throws an error if a box has no valid JSON.
export function shapes() {
  const tools = parsed("tools");
  const schema = parsed("schema");
  return {
    ...(tools ? { tools: Array.isArray(tools) ? tools : [tools] } : {}),
    ...(schema ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } } : {}),
    ...($("pin").checked ? {} : { pin: false }),
  };
}

export function system() {
  const content = $("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

for (const [name, value] of Object.entries({ tool: TOOL, schema: SCHEMA })) {
  $(`example-${name}`).addEventListener("click", () => {
    const box = $(name === "tool" ? "tools" : "schema");
    if (!box.value.trim()) box.value = JSON.stringify(value, null, 1); // otherwise, what is there would be lost
    box.focus();
  });
}
