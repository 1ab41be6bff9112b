// node ai_sdk_checks.mjs URL, beside node_modules: the Vercel AI SDK's objects and tools, whole and streamed.
import assert from "node:assert";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const from = createRequire(`${process.cwd()}/package.json`); // the test runs this where the packages are
const load = (name) => import(pathToFileURL(from.resolve(name)));
const { generateObject, generateText, stepCountIs, streamObject, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const url = `${process.argv[2]}/v1`;
const name = (await (await fetch(`${url}/models`)).json()).data[0].id;
const served = createOpenAICompatible({ name: "jaxspec", baseURL: url, apiKey: "none", supportsStructuredOutputs: true });
const schema = z.object({ name: z.enum(["Paris", "Rome"]), degrees: z.number().int().min(-30).max(50), sunny: z.boolean() });
const places = [];
const weather = tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
  execute: async ({ city }) => (places.push(city), `9 degrees in ${city}`),
});
const asked = { model: served(name), prompt: "How is the weather in Paris?", temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
// The model must call once; then it may do as it likes.
const loop = { ...asked, tools: { weather }, stopWhen: stepCountIs(2), providerOptions: { jaxspec: { parallel_tool_calls: false } },
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }) };

const { object } = await generateObject({ ...asked, schema });
schema.parse(object);
const stream = streamObject({ ...asked, schema });
const parts = [];
for await (const part of stream.partialObjectStream) parts.push(part);
assert.deepEqual(await stream.object, object);
assert(parts.length > 1);

const whole = await generateText(loop);
const [call] = whole.steps[0].toolCalls;
assert.equal(call.toolName, "weather");
assert.deepEqual(places.splice(0), whole.steps[0].toolCalls.map(({ input }) => input.city));
const streamed = streamText(loop);
const kinds = [];
for await (const part of streamed.fullStream) {
  if (part.type === "error") throw part.error;
  kinds.push(part.type);
}
assert(kinds.includes("tool-input-delta") && kinds.includes("tool-result") && kinds.includes("text-delta"), `${kinds}`);
assert.deepEqual((await streamed.steps)[0].toolCalls[0].input, call.input);
assert.equal(await streamed.text, whole.text);
const { version } = from("ai/package.json");
console.log(JSON.stringify({ versions: { ai: version }, passed: ["objects", "tools"] }));
