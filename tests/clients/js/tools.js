// Tests tools with the official JavaScript client. Usage: node tools.js BASE_URL MODEL scripted|required
//
// This script is the counterpart of tools.py, which describes `scripted` and `required`. The first scenario that fails
// ends the run.

import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model, kind] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0, timeout: 300_000 });
const question = [{ role: "user", content: "Is it warmer in Paris or in London?" }];

const parameters = (properties) => ({
  type: "object",
  properties,
  required: Object.keys(properties),
  additionalProperties: false,
});
const weather = parameters({ city: { type: "string" }, days: { type: "integer" } });
const numbers = parameters({ one: { type: "integer" }, other: { type: "integer" } });

// Returns tools that record their arguments.
function noting(calls) {
  const tool = (name, schema) => ({
    type: "function",
    function: {
      name,
      strict: true,
      parameters: schema,
      parse: JSON.parse,
      function: (given) => {
        calls.push([name, given]);
        return "21";
      },
    },
  });
  return [tool("get_weather", weather), tool("compare", numbers)];
}

const expected = [
  ["get_weather", { city: "Paris", days: 1 }],
  ["get_weather", { city: "London", days: 1 }],
  ["compare", { one: 21, other: -4 }],
];

async function theToolRunnerLoopsThreeTimes() {
  const calls = [];
  const runner = client.chat.completions.runTools({ model, messages: question, tools: noting(calls), temperature: 0 });
  assert.equal(await runner.finalContent(), "Paris is warmer.");
  assert.deepEqual(calls, expected);
}

async function theStreamingToolRunnerLoopsThreeTimes() {
  const calls = [];
  const runner = client.chat.completions.runTools({
    model,
    messages: question,
    tools: noting(calls),
    temperature: 0,
    stream: true,
  });
  const reasons = [];
  runner.on("chatCompletion", (answer) => reasons.push(answer.choices[0].finish_reason));
  assert.equal(await runner.finalContent(), "Paris is warmer.");
  assert.deepEqual(calls, expected);
  assert.deepEqual(reasons, ["tool_calls", "tool_calls", "stop"]);
}

async function theStreamHelperGathersCalls() {
  const tools = [{ type: "function", function: { name: "get_weather", parameters: weather } }];
  const stream = client.chat.completions.stream({ model, messages: question, tools, temperature: 0 });
  let pieces = "";
  stream.on("tool_calls.function.arguments.delta", ({ arguments_delta }) => (pieces += arguments_delta));
  const { message, finish_reason } = (await stream.finalChatCompletion()).choices[0];
  assert.equal(finish_reason, "tool_calls");
  assert.equal(message.tool_calls.length, 1);
  assert.equal(message.tool_calls[0].function.arguments, pieces);
  assert.deepEqual(JSON.parse(pieces), expected[0][1]);
  assert.match(message.tool_calls[0].id, /^call_[A-Za-z0-9]{24}$/);
}

async function threeTurnsThatMustCall() {
  const messages = [...question];
  const tools = noting([]).map(({ type, function: { name, strict, parameters } }) => ({
    type,
    function: { name, strict, parameters },
  }));
  for (const [choice, names] of [
    ["required", ["get_weather", "compare"]],
    [{ type: "function", function: { name: "compare" } }, ["compare"]],
    ["required", ["get_weather", "compare"]],
  ]) {
    const answer = await client.chat.completions.create({
      model,
      messages,
      tools,
      tool_choice: choice,
      temperature: 0,
      max_tokens: 200,
      parallel_tool_calls: false,
    });
    const { message, finish_reason } = answer.choices[0];
    assert.equal(finish_reason, "tool_calls");
    assert.equal(message.tool_calls.length, 1);
    const [{ id, function: called }] = message.tool_calls;
    assert.ok(names.includes(called.name), called.name);
    const wanted = called.name === "compare" ? ["one", "other"] : ["city", "days"];
    assert.deepEqual(Object.keys(JSON.parse(called.arguments)).sort(), wanted);
    messages.push(message, { role: "tool", tool_call_id: id, content: "21" });
  }
}

const scenarios = {
  scripted: [theToolRunnerLoopsThreeTimes, theStreamingToolRunnerLoopsThreeTimes, theStreamHelperGathersCalls],
  required: [threeTurnsThatMustCall],
}[kind];

for (const scenario of scenarios) {
  console.log(scenario.name);
  await scenario();
}
console.log(`${scenarios.length} scenarios passed`);
