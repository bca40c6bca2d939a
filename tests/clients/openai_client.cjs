// OpenAI's client for JavaScript, called as tests of node's own runner.

const assert = require("node:assert/strict");
const { test } = require("node:test");
const OpenAI = require("openai");

const client = new OpenAI({ baseURL: `${process.env.PACELINE_URL}/v1`, apiKey: "none", maxRetries: 0 });
const model = "pydoc";
const messages = [{ role: "user", content: "What does json.dumps do?" }];
const chat = { model, messages, temperature: 0, max_completion_tokens: 200 };
const schema = {
  type: "object",
  properties: { city: { enum: ["Oslo", "Köln", "東京"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};
const forecast = { name: "forecast", description: "The weather of the next days.", parameters: schema };
const forced = {
  tools: [{ type: "function", function: forecast }],
  tool_choice: "required",
  parallel_tool_calls: false,
};

function checkForecast(text) {
  const { city, days, ...others } = JSON.parse(text);
  assert.ok(schema.properties.city.enum.includes(city));
  assert.ok(days >= 1 && days <= 9);
  assert.deepEqual(others, {});
}

test("models", async () => {
  const names = [];
  for await (const each of client.models.list()) names.push(each.id);
  assert.deepEqual(names, [model]);
});

test("chat, its stream, and speculation off", async () => {
  const [drafted, plain] = await Promise.all([
    client.chat.completions.create(chat),
    client.chat.completions.create({ ...chat, speculative: false }),
  ]);
  const text = drafted.choices[0].message.content;
  assert.ok(text);
  assert.equal(plain.choices[0].message.content, text);
  let streamed = "";
  for await (const chunk of await client.chat.completions.create({ ...chat, stream: true })) {
    streamed += chunk.choices[0]?.delta?.content ?? "";
  }
  assert.equal(streamed, text);
});

test("forced call", async () => {
  const answer = await client.chat.completions.create({ ...chat, ...forced });
  assert.equal(answer.choices[0].finish_reason, "tool_calls");
  for (const call of answer.choices[0].message.tool_calls) checkForecast(call.function.arguments);
});

test("forced call in a stream", async () => {
  const stream = client.chat.completions.stream({ ...chat, ...forced });
  const final = await stream.finalChatCompletion();
  const [call] = final.choices[0].message.tool_calls;
  assert.equal(call.function.name, "forecast");
  checkForecast(call.function.arguments);
});

test("JSON by a schema", async () => {
  const response_format = { type: "json_schema", json_schema: { name: "forecast", strict: true, schema } };
  const answer = await client.chat.completions.create({ ...chat, response_format });
  checkForecast(answer.choices[0].message.content);
});

test("completion", async () => {
  const fields = { model, prompt: "def read_lines(path):\n", max_tokens: 24, temperature: 0 };
  const [drafted, plain] = await Promise.all([
    client.completions.create(fields),
    client.completions.create({ ...fields, speculative: false }),
  ]);
  assert.equal(drafted.choices[0].text, plain.choices[0].text);
});

test("response, its stream, and one that follows", async () => {
  const fields = { model, input: messages[0].content, temperature: 0, max_output_tokens: 200 };
  const first = await client.responses.create(fields);
  const stream = client.responses.stream(fields);
  const streamed = await stream.finalResponse();
  assert.equal(streamed.output_text, first.output_text);
  const second = await client.responses.create({ ...fields, input: "And json.loads?", previous_response_id: first.id });
  assert.ok(second.usage.input_tokens > first.usage.input_tokens);
});

test("errors", async () => {
  await assert.rejects(client.chat.completions.create({ ...chat, model: "gpt-5" }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ ...chat, temperature: -1 }), OpenAI.BadRequestError);
});
