// Tests the responses endpoint with the official JavaScript client.
// Usage: node responses.js BASE_URL MODEL scripted|real
//
// This script is the counterpart of responses.py, which describes `scripted` and `real`. The first scenario that fails
// ends the run.

import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model, kind] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0, timeout: 300_000 });
const question = "Is it warmer in Paris or in London?";
const tools = ["get_weather", "compare"].map((name) => ({ type: "function", name, parameters: null, strict: false }));
const expected = [
  [["get_weather", { city: "Paris", days: 1 }]],
  [
    ["get_weather", { city: "London", days: 1 }],
    ["compare", { one: 21, other: -4 }],
  ],
  [],
];

const calls = (response) => response.output.filter((item) => item.type === "function_call");
const outputs = (response) =>
  calls(response).map(({ call_id }) => ({ type: "function_call_output", call_id, output: "21" }));

function called(response) {
  return calls(response).map((call) => [call.name, JSON.parse(call.arguments)]);
}

async function expectError(kind, code, promise) {
  await assert.rejects(promise, (error) => {
    assert.ok(error instanceof kind, `${error?.constructor?.name}, not ${kind.name}: ${error}`);
    assert.ok(error.error?.message, "the error has a message");
    if (code) assert.equal(error.code, code);
    return true;
  });
}

async function aLoopOfThreeTurnsByTheServersMemory() {
  let response = await client.responses.create({ model, input: question, tools, temperature: 0 });
  assert.equal(response.output[0].summary[0].text, "Let me see.\n");
  for (const turn of expected) {
    assert.deepEqual(called(response), turn);
    if (turn.length) {
      const previous_response_id = response.id;
      response = await client.responses.create({ model, input: outputs(response), tools, previous_response_id });
    }
  }
  assert.equal(response.output_text, "Paris is warmer.");
  const given = [];
  for await (const item of client.responses.inputItems.list(response.id, { order: "asc", limit: 3 })) given.push(item);
  assert.equal(given.length, 9);
  assert.equal((await client.responses.retrieve(response.id)).output_text, "Paris is warmer.");
  await client.responses.delete(response.id);
  await expectError(OpenAI.NotFoundError, "response_not_found", client.responses.retrieve(response.id));
}

// Returns the response that the client's helper assembles from the events of a stream, and checks that its items have
// the same IDs as those of the response in the last event.
async function streamed(parameters) {
  const runner = client.responses.stream({ model, temperature: 0, ...parameters });
  let number = 0;
  let last;
  runner.on("event", (event) => {
    assert.equal(event.sequence_number, number);
    number += 1;
    last = event;
  });
  const final = await runner.finalResponse();
  assert.deepEqual(
    final.output.map((item) => item.id),
    last.response.output.map((item) => item.id),
  );
  return final;
}

async function aLoopOfThreeStreamedTurnsInAConversation() {
  const conversation = await client.conversations.create({ model });
  let input = question;
  let response;
  for (const turn of expected) {
    response = await streamed({ input, tools, conversation: conversation.id });
    assert.deepEqual(called(response), turn);
    input = outputs(response);
  }
  assert.equal(response.output_text, "Paris is warmer.");
  await client.conversations.delete(conversation.id);
  await expectError(OpenAI.NotFoundError, "conversation_not_found", client.conversations.retrieve(conversation.id));
}

async function aResponseInTheBackgroundIsPolledAndFollowed() {
  const parameters = { model, input: "Count to a hundred.", max_output_tokens: 40, background: true };
  const begun = await client.responses.create(parameters);
  let now = begun;
  while (["queued", "in_progress"].includes(now.status)) now = await client.responses.retrieve(begun.id);
  assert.ok(["completed", "incomplete"].includes(now.status), now.status);
  const events = [];
  for await (const event of await client.responses.create({ ...parameters, stream: true })) events.push(event);
  const id = events[0].response.id;
  const again = [];
  for await (const event of await client.responses.retrieve(id, { stream: true })) again.push(event);
  assert.deepEqual(again, events);
  const helped = await client.responses.stream({ response_id: id, starting_after: 3 }).finalResponse();
  // Compare only the IDs, texts and arguments, because the helper adds parsed values to the response.
  const said = (response) => response.output.map((item) => [item.id, item.content?.[0]?.text ?? item.arguments]);
  assert.deepEqual(said(helped), said(events.at(-1).response));
}

async function aConversationIsChangedItemByItem() {
  const said = (content) => ({ type: "message", role: "user", content });
  const { id } = await client.conversations.create({ model, metadata: { a: "b" }, items: [said("a")] });
  assert.deepEqual((await client.conversations.update(id, { metadata: { c: "d" } })).metadata, { c: "d" });
  const added = await client.conversations.items.create(id, { items: [said("b"), said("c")] });
  const [first, second] = added.data;
  const named = { conversation_id: id };
  assert.deepEqual(await client.conversations.items.retrieve(first.id, named), first);
  await client.conversations.items.delete(first.id, named);
  await expectError(OpenAI.NotFoundError, "item_not_found", client.conversations.items.retrieve(first.id, named));
  const input = [{ type: "item_reference", id: second.id }];
  const create = (parameters) => client.responses.create({ model, max_output_tokens: 4, ...parameters });
  assert.ok((await create({ input })).usage.input_tokens > 0);
  await expectError(OpenAI.BadRequestError, "invalid_value", create({ input, conversation: id }));
  const response = await create({ input: "d", conversation: id });
  const include = ["message.output_text.logprobs"];
  assert.equal((await client.responses.retrieve(response.id, { include })).conversation.id, id);
  const texts = [];
  for await (const item of client.conversations.items.list(id, { order: "asc", limit: 2 }))
    if (item.role === "user") texts.push(item.content[0].text);
  assert.deepEqual(texts, ["a", "c", "d"]);
  const { input_tokens } = await client.responses.inputTokens.count({ model, input: "Hi" });
  assert.ok(input_tokens > 0);
  assert.ok((await client.conversations.delete(id)).deleted);
}

async function aTextStreamsAsItIsAnsweredAtOnce() {
  const parameters = { input: "Name three colours.", temperature: 0, max_output_tokens: 30, instructions: "Be brief." };
  const whole = await client.responses.create({ model, ...parameters });
  const response = await streamed(parameters);
  assert.ok(whole.output_text.length > 0);
  assert.equal(response.output_text, whole.output_text);
  assert.equal(response.usage.output_tokens, whole.usage.output_tokens);
}

async function structuredOutputIsParsed() {
  const schema = {
    type: "object",
    properties: { name: { type: "string" }, country: { type: "string" } },
    required: ["name", "country"],
    additionalProperties: false,
  };
  const parameters = {
    input: "Describe Paris as JSON.",
    max_output_tokens: 200,
    text: { format: { type: "json_schema", name: "city", strict: true, schema } },
  };
  const whole = await client.responses.parse({ model, temperature: 0, ...parameters });
  const { name, country } = JSON.parse(whole.output_text);
  assert.deepEqual([typeof name, typeof country], ["string", "string"]);
  assert.equal((await streamed(parameters)).output_text, whole.output_text);
}

async function errorsAreTyped() {
  const create = (changed) => client.responses.create({ model, input: "Hi", max_output_tokens: 4, ...changed });
  await expectError(OpenAI.NotFoundError, "model_not_found", create({ model: "no-such-model" }));
  await expectError(OpenAI.NotFoundError, "previous_response_not_found", create({ previous_response_id: "resp_1" }));
  await expectError(OpenAI.BadRequestError, undefined, create({ temperature: 9 }));
  await expectError(OpenAI.BadRequestError, undefined, create({ stream: true, input: [] }));
}

const scenarios = {
  scripted: [
    aLoopOfThreeTurnsByTheServersMemory,
    aLoopOfThreeStreamedTurnsInAConversation,
    aConversationIsChangedItemByItem,
    aResponseInTheBackgroundIsPolledAndFollowed,
    errorsAreTyped,
  ],
  real: [aTextStreamsAsItIsAnsweredAtOnce, structuredOutputIsParsed, aResponseInTheBackgroundIsPolledAndFollowed],
}[kind];

for (const scenario of scenarios) {
  console.log(scenario.name);
  await scenario();
}
console.log(`${scenarios.length} scenarios passed`);
