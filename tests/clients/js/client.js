// Tests the server with the official JavaScript client. Usage: node client.js BASE_URL MODEL
//
// Each scenario is a function whose name describes the expected behavior. The run ends at the first failure.

import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0, timeout: 300_000 });
const paris = [{ role: "user", content: "What is the capital of France?" }];
const colours = [{ role: "user", content: "Name three colours of the rainbow." }];

async function expectError(kind, status, promise, param) {
  await assert.rejects(promise, (error) => {
    assert.ok(error instanceof kind, `${error?.constructor?.name}, not ${kind.name}: ${error}`);
    assert.equal(error.status, status);
    assert.ok(error.error?.message, "the error has a message");
    if (param) assert.equal(error.param, param);
    return true;
  });
}

async function modelsAreListedAndRetrieved() {
  const ids = [];
  for await (const entry of client.models.list()) ids.push(entry.id);
  assert.ok(ids.includes(model), `${ids}`);
  assert.equal((await client.models.retrieve(model)).id, model);
  await expectError(OpenAI.NotFoundError, 404, client.models.retrieve("no-such-model"));
}

async function chatSaysParis() {
  const answer = await client.chat.completions.create({ model, messages: paris, temperature: 0 });
  assert.match(answer.choices[0].message.content, /Paris/);
  assert.equal(answer.choices[0].finish_reason, "stop");
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
}

async function aStreamedChatEqualsAWholeAnswer() {
  const parameters = { model, messages: colours, temperature: 0, max_tokens: 40 };
  const whole = await client.chat.completions.create(parameters);
  const stream = await client.chat.completions.create({
    ...parameters,
    stream: true,
    stream_options: { include_usage: true },
  });
  let text = "";
  let usage;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
}

async function theStreamHelperGathersTheAnswer() {
  const runner = client.chat.completions.stream({ model, messages: paris, temperature: 0 });
  let deltas = "";
  runner.on("content", (delta) => (deltas += delta));
  const final = await runner.finalChatCompletion();
  assert.match(deltas, /Paris/);
  assert.equal(final.choices[0].message.content, deltas);
  assert.equal(final.choices[0].finish_reason, "stop");
}

async function completionsContinueAPrompt() {
  const parameters = { model, prompt: "The capital of France is", temperature: 0, max_tokens: 8 };
  const whole = await client.completions.create(parameters);
  assert.match(whole.choices[0].text, /Paris/);
  assert.equal(whole.choices[0].finish_reason, "length");
  let text = "";
  for await (const chunk of await client.completions.create({ ...parameters, stream: true })) {
    text += chunk.choices[0]?.text ?? "";
  }
  assert.equal(text, whole.choices[0].text);
}

async function logprobsAreThoseOfTheTokens() {
  const answer = await client.chat.completions.create({
    model,
    messages: paris,
    temperature: 0,
    max_tokens: 5,
    logprobs: true,
    top_logprobs: 2,
  });
  const content = answer.choices[0].logprobs.content;
  assert.equal(content.map((token) => token.token).join(""), answer.choices[0].message.content);
  for (const token of content) {
    assert.ok(token.logprob <= 0);
    assert.equal(token.top_logprobs.length, 2);
    assert.equal(token.top_logprobs[0].token, token.token);
  }
}

async function nGivesSeveralChoicesReproducibly() {
  const parameters = { model, messages: colours, temperature: 1, n: 2, seed: 7, max_tokens: 16 };
  const texts = async () =>
    (await client.chat.completions.create(parameters)).choices.map((choice) => choice.message.content);
  const first = await texts();
  assert.equal(first.length, 2);
  assert.notEqual(first[0], first[1]);
  assert.deepEqual(await texts(), first);
}

async function stopStringsEndTheText() {
  const answer = await client.chat.completions.create({ model, messages: paris, temperature: 0, stop: " Paris" });
  assert.equal(answer.choices[0].finish_reason, "stop");
  assert.ok(answer.choices[0].message.content.length > 0);
  assert.doesNotMatch(answer.choices[0].message.content, /Paris/);
}

async function theServerRespondsAfterAnAbortedStream() {
  const stream = await client.chat.completions.create({ model, messages: colours, max_tokens: 500, stream: true });
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    break; // the client closes the connection
  }
  await chatSaysParis();
}

async function errorsAreTyped() {
  const chat = (changed) => client.chat.completions.create({ model, messages: paris, max_tokens: 4, ...changed });
  await expectError(OpenAI.NotFoundError, 404, chat({ model: "no-such-model" }));
  await expectError(OpenAI.BadRequestError, 400, chat({ temperature: 9 }), "temperature");
  await expectError(OpenAI.BadRequestError, 400, chat({ messages: [] }), "messages");
  await expectError(OpenAI.BadRequestError, 400, chat({ stream: true, top_p: -1 }), "top_p");
}

async function concurrentRequestsAreAllAnswered() {
  const answers = await Promise.all(
    Array.from({ length: 32 }, async (_, number) => {
      const messages = [{ role: "user", content: `What is ${number} plus ${number}?` }];
      const answer = await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 16 });
      return answer.choices[0].message.content;
    }),
  );
  assert.ok(answers.every((answer) => answer.length > 0));
  assert.ok(new Set(answers).size > 16, `${new Set(answers).size} different answers`);
}

const scenarios = [
  modelsAreListedAndRetrieved,
  chatSaysParis,
  aStreamedChatEqualsAWholeAnswer,
  theStreamHelperGathersTheAnswer,
  completionsContinueAPrompt,
  logprobsAreThoseOfTheTokens,
  nGivesSeveralChoicesReproducibly,
  stopStringsEndTheText,
  theServerRespondsAfterAnAbortedStream,
  errorsAreTyped,
  concurrentRequestsAreAllAnswered,
];

for (const scenario of scenarios) {
  console.log(scenario.name);
  await scenario();
}
console.log(`${scenarios.length} scenarios passed`);
