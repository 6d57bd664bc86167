// Sends images with the official JavaScript client. Usage: node images.js BASE_URL MODEL
//
// The server's model must use 16 prompt tokens for an image, and its answers must depend on the images. The first
// scenario that fails ends the run.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { dataURL, gif } from "./gif.js";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0, timeout: 120_000 });

const images = [0, 200].map((red) => dataURL(gif(red)));
const part = (url) => ({ type: "image_url", image_url: { url } });
const messages = (url) => [{ role: "user", content: [part(url), { type: "text", text: "What is this?" }] }];
const options = { max_tokens: 8, temperature: 0 };

const scenarios = {
  async answersDependOnTheImages() {
    const answer = async (url) => {
      const completion = await client.chat.completions.create({ model, messages: messages(url), ...options });
      assert.equal(completion.usage.prompt_tokens_details.image_tokens, 16);
      return completion.choices[0].message.content;
    };
    const [first, second, again] = [await answer(images[0]), await answer(images[1]), await answer(images[0])];
    assert.equal(first, again);
    assert.notEqual(first, second);
  },

  async streamsImages() {
    const stream = client.chat.completions.stream({ model, messages: messages(images[1]), ...options });
    const completion = await stream.finalChatCompletion();
    assert.ok(completion.choices[0].message.content);
  },

  async respondsToImages() {
    const content = [
      { type: "input_text", text: "What is this?" },
      { type: "input_image", image_url: images[0], detail: "high" },
    ];
    const input = [{ role: "user", content }];
    const response = await client.responses.create({ model, input, max_output_tokens: 8 });
    assert.ok(response.usage.input_tokens > 16);
    assert.equal(response.usage.input_tokens_details.image_tokens, 16);
    const stream = client.responses.stream({ model, input, max_output_tokens: 8 });
    assert.ok((await stream.finalResponse()).output_text);
  },

  async refusesOtherAddresses() {
    const url = "http://127.0.0.1/a.png";
    await assert.rejects(client.chat.completions.create({ model, messages: messages(url) }), (error) => {
      assert.equal(error.status, 400);
      assert.equal(error.param, "messages[0].content[0].image_url");
      return true;
    });
  },
};

for (const [name, scenario] of Object.entries(scenarios)) {
  await scenario();
  console.log(`${name}: passed`);
}
console.log(`${Object.keys(scenarios).length} scenarios passed`);
