// Sends images to the chat completions and responses endpoints, with the AI SDK and two of its providers.
// Usage: node ai_sdk_images.js BASE_URL MODEL
//
// The server's model must use 16 prompt tokens for an image, and its answers must depend on the images. The first
// scenario that fails ends the run.

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, streamText } from "ai";
import { dataURL, gif } from "./gif.js";

const IMAGE_TOKENS = 16;
const [baseURL, modelName] = process.argv.slice(2);
const apiKey = "unused";
const openai = createOpenAI({ baseURL, apiKey });
const compatible = createOpenAICompatible({ name: "ovfleet", baseURL, apiKey, includeUsage: true });
const models = {
  "openai, chat completions": openai.chat(modelName),
  "openai, responses": openai.responses(modelName),
  "openai-compatible": compatible.chatModel(modelName),
};

const text = (content) => ({ type: "text", text: content });
const user = (...content) => ({ role: "user", content });
const image = (file) => ({ type: "image", image: file });
const request = (model, ...messages) => ({
  model,
  messages,
  maxOutputTokens: 8,
  temperature: 0,
  maxRetries: 0,
  abortSignal: AbortSignal.timeout(120_000),
});
const answer = (model, ...messages) => generateText(request(model, ...messages));
const randomImage = () => {
  const file = Buffer.concat([gif(1)]);
  crypto.getRandomValues(file.subarray(13, 16));
  return file;
};

const scenarios = {
  async answersDependOnTheImages(model) {
    const answers = [];
    for (const file of [gif(0), gif(200)]) {
      // The forms of an image that the AI SDK documents: bytes, base64, a data URL, and a file.
      const parts = [
        image(file),
        image(file.toString("base64")),
        image(dataURL(file)),
        { type: "file", data: file, mediaType: "image/gif" },
      ];
      const said = new Set();
      for (const part of parts) {
        said.add((await answer(model, user(part, text("What is this?")))).text);
      }
      assert.equal(said.size, 1);
      answers.push(...said);
    }
    assert.ok(answers[0]);
    assert.notEqual(answers[0], answers[1]);
    const forward = await answer(model, user(image(gif(0)), image(gif(200))));
    const backward = await answer(model, user(image(gif(200)), image(gif(0))));
    assert.notEqual(forward.text, backward.text);
  },

  async usageCountsTheTokensOfImages(model) {
    const counts = [];
    for (const number of [0, 1, 2]) {
      const images = Array.from({ length: number }, () => image(randomImage()));
      const { usage, response } = await answer(model, user(text("What is this?"), ...images));
      counts.push(usage.inputTokens);
      // The usage of the AI SDK omits the number of image tokens, so the test reads it from the body of the response.
      const { prompt_tokens_details, input_tokens_details } = response.body.usage;
      const details = model === models["openai, responses"] ? input_tokens_details : prompt_tokens_details;
      assert.equal(details.image_tokens ?? 0, number * IMAGE_TOKENS);
    }
    assert.ok(counts[1] - counts[0] >= IMAGE_TOKENS, `${counts}`);
    assert.equal(counts[2] - counts[1], counts[1] - counts[0]);
  },

  async streamsAreTheSameAsAnswers(model) {
    const message = user(image(gif(100)), text("What is this?"));
    const whole = await answer(model, message);
    const stream = streamText(request(model, message));
    let streamed = "";
    for await (const chunk of stream.textStream) {
      streamed += chunk;
    }
    assert.equal(streamed, whole.text);
    assert.equal((await stream.usage).inputTokens, whole.usage.inputTokens);
  },

  async theNextTurnReadsTheImageFromTheCache(model) {
    const first = user(image(randomImage()), text("What is this, and where was it taken?"));
    const said = await answer(model, first);
    const { usage } = await answer(model, first, ...said.response.messages, user(text("Are you sure?")));
    assert.ok(usage.inputTokenDetails.cacheReadTokens > IMAGE_TOKENS, JSON.stringify(usage));
  },

  async errorsNameThePart(model) {
    const file = Buffer.from("R0lGODlhAQAB", "base64");
    await assert.rejects(answer(model, user(text("What is this?"), image(file))), (error) => {
      assert.ok(APICallError.isInstance(error), error);
      assert.equal(error.statusCode, 400);
      assert.match(JSON.parse(error.responseBody).error.param, /content\[1\]\.image_url$/);
      return true;
    });
  },
};

let passed = 0;
for (const [name, model] of Object.entries(models)) {
  for (const [scenario, run] of Object.entries(scenarios)) {
    await run(model);
    console.log(`${name}, ${scenario}: passed`);
    passed += 1;
  }
}
console.log(`${passed} scenarios passed`);
