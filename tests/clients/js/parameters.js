// Tests the parameters of completions and chats with the official JavaScript client.
// Usage: node parameters.js BASE_URL MODEL
//
// Each scenario is a function whose name describes the expected behavior. The run ends at the first failure.

import assert from "node:assert/strict";

import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "unused", maxRetries: 0, timeout: 300_000 });
const PROMPT = "The capital of France is";

async function anEchoHasLogProbabilitiesStreamedOrNot() {
  const body = { model, prompt: PROMPT, temperature: 0, max_tokens: 4, echo: true, logprobs: 1 };
  const { choices: [whole] } = await client.completions.create(body);
  assert.ok(whole.text.startsWith(PROMPT), whole.text);
  assert.equal(whole.logprobs.token_logprobs[0], null);
  let text = "";
  const tokens = [];
  for await (const chunk of await client.completions.create({ ...body, stream: true })) {
    text += chunk.choices[0].text;
    tokens.push(...(chunk.choices[0].logprobs?.tokens ?? []));
  }
  assert.deepEqual([text, tokens], [whole.text, whole.logprobs.tokens]);
}

async function usageIsReportedContinuously() {
  const counts = [];
  const stream = await client.chat.completions.create({
    model,
    messages: [{ role: "user", content: "Count to five." }],
    max_tokens: 6,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  });
  for await (const chunk of stream) {
    counts.push(chunk.usage.completion_tokens);
  }
  assert.deepEqual(counts, counts.toSorted((a, b) => a - b));
  assert.ok(counts.at(-1) > 0, counts);
}

async function textsAndTokensAreConverted() {
  const { tokens } = await client.post("/tokenize", { body: { model, prompt: PROMPT } });
  const { text } = await client.post("/detokenize", { body: { model, tokens } });
  assert.ok(text.includes(PROMPT), text);
}

async function valuesOutOfRangeAreRejected() {
  const refused = client.completions.create({ model, prompt: PROMPT, best_of: 2, n: 3 });
  await assert.rejects(refused, (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError, error);
    assert.deepEqual([error.param, error.code], ["best_of", "integer_below_min_value"]);
    return true;
  });
}

const scenarios = [
  anEchoHasLogProbabilitiesStreamedOrNot,
  usageIsReportedContinuously,
  textsAndTokensAreConverted,
  valuesOutOfRangeAreRejected,
];
for (const scenario of scenarios) {
  console.log(scenario.name);
  await scenario();
}
console.log(`${scenarios.length} scenarios passed`);
