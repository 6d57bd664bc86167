// Tests structured output with the official JavaScript client and Zod. Usage: node structured.js BASE_URL MODEL
//
// Structured output is enforced even if the model prefers other output. The first scenario that fails
// ends the run.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "Tell me about the weather in Paris, in JSON." }];
// Requests with these options set a seed. Without a seed, a random answer may contain so much whitespace that it does
// not end within `max_tokens`.
const options = { max_tokens: 400, temperature: 1 };

const Weather = z.object({
  city: z.string().max(30),
  unit: z.enum(["C", "F"]),
  days: z.array(z.object({ degrees: z.number().int().min(-50).max(60), sunny: z.boolean() })).max(3),
  note: z.string().max(20).nullable(),
});
const Report = z.object({ city: z.string().max(30), degrees: z.number().int().min(-50).max(60) });

const scenarios = {
  async parsesZodSchemas() {
    for (let seed = 0; seed < 4; seed += 1) {
      const completion = await client.chat.completions.parse({
        model, messages, seed, ...options, response_format: zodResponseFormat(Weather, "weather"),
      });
      const { finish_reason, message } = completion.choices[0];
      assert.equal(finish_reason, "stop");
      Weather.parse(message.parsed);
    }
  },

  async streamsZodSchemas() {
    const stream = client.chat.completions.stream({
      model, messages, seed: 0, ...options, response_format: zodResponseFormat(Weather, "weather"),
    });
    const completion = await stream.finalChatCompletion();
    Weather.parse(completion.choices[0].message.parsed);
  },

  async parsesArgumentsOfTools() {
    const completion = await client.chat.completions.parse({
      model,
      messages,
      seed: 0,
      ...options,
      tools: [zodFunction({ name: "report", parameters: Report })],
      tool_choice: "required",
      parallel_tool_calls: false,
    });
    const { finish_reason, message } = completion.choices[0];
    assert.equal(finish_reason, "tool_calls");
    assert.equal(message.tool_calls.length, 1);
    Report.parse(message.tool_calls[0].function.parsed_arguments);
  },

  async parsesResponses() {
    const response = await client.responses.parse({
      model,
      input: messages[0].content,
      max_output_tokens: 400,
      temperature: 0,
      text: { format: zodTextFormat(Weather, "weather") },
    });
    Weather.parse(response.output_parsed);
  },

  async saysWhereASchemaIsWrong() {
    const schema = { type: "object", properties: { tags: { type: "array", uniqueItems: true } } };
    const response_format = { type: "json_schema", json_schema: { name: "x", schema } };
    await assert.rejects(client.chat.completions.create({ model, messages, response_format }), (error) => {
      assert.equal(error.status, 400);
      assert.equal(error.param, "response_format.json_schema.schema.properties.tags");
      return true;
    });
  },
};

for (const [name, scenario] of Object.entries(scenarios)) {
  await scenario();
  console.log(`${name}: passed`);
}
console.log(`${Object.keys(scenarios).length} scenarios passed`);
