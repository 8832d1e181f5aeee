// Vercel's AI SDK through its OpenAI (Responses and chat), OpenAI-compatible and Anthropic providers.
//
// Its parsers are zod schemas: a field of the wrong kind is an error, not a shrug.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { Output, generateText, streamText, tool } from 'ai';
import { z } from 'zod';

import { ALPHABET, CALL, FORM_TOKENS, MODEL, URL, all, untilIdle } from './support.mjs';

globalThis.AI_SDK_LOG_WARNINGS = false;

const baseURL = `${URL}/v1`;
const compatible = createOpenAICompatible({
  name: 'headrace', baseURL, apiKey: 'none', includeUsage: true, supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL, apiKey: 'none' });
const anthropic = createAnthropic({ baseURL, apiKey: 'none' });
const MODELS = {
  'openai-compatible': compatible(MODEL),
  'openai chat': openai.chat(MODEL),
  'openai responses': openai.responses(MODEL),
  anthropic: anthropic(MODEL),
};

const Weather = z.object({ sky: z.enum(['clear', 'grey']), rain: z.boolean() });
const tools = { add: tool({ description: 'Adds.', inputSchema: z.object({ a: z.number(), s: z.string() }) }) };

for (const [name, model] of Object.entries(MODELS)) {
  const ask = (script, more = {}) =>
    ({ model, prompt: `<|${script}|>`, temperature: 0, maxRetries: 0, maxOutputTokens: 100, ...more });

  test(`${name}: text, whole and streamed, with usage`, async () => {
    const whole = await generateText(ask('s05'));
    assert.equal(whole.text, ALPHABET);
    assert.equal(whole.finishReason, 'stop');
    assert.equal(whole.usage.outputTokens, 9);

    const streamed = streamText(ask('s05'));
    assert.equal((await all(streamed.textStream)).join(''), ALPHABET);
    assert.equal((await streamed.usage).outputTokens, 9);
    assert.equal(await streamed.finishReason, 'stop');
  });

  test(`${name}: an abort in mid stream ends the request`, async () => {
    const controller = new AbortController();
    const streamed = streamText(ask('s01', { abortSignal: controller.signal, maxOutputTokens: 7000 }));
    const kinds = [];
    for await (const part of streamed.fullStream) {
      kinds.push(part.type);
      if (part.type === 'text-delta') controller.abort();
    }
    assert.ok(kinds.includes('abort'), kinds.join());
    await untilIdle();
  });

  test(`${name}: tool calls, whole and streamed`, async () => {
    const whole = await generateText(ask('s04', { tools }));
    assert.equal(whole.finishReason, 'tool-calls');
    assert.deepEqual(whole.toolCalls.map((call) => [call.toolName, call.input]), [['add', CALL]]);
    const streamed = streamText(ask('s04', { tools }));
    await streamed.consumeStream();
    assert.deepEqual((await streamed.toolCalls).map((call) => [call.toolName, call.input]), [['add', CALL]]);
  });

  test(`${name}: a schema is enforced and parsed`, async () => {
    const whole = await generateText(ask('s12', { output: Output.object({ schema: Weather }), maxOutputTokens: FORM_TOKENS }));
    Weather.parse(whole.output);
  });
}

test('openai-compatible: reasoning is apart from the answer', async () => {
  const streamed = streamText({ model: compatible(MODEL), prompt: '<|s03|>', temperature: 0, maxRetries: 0 });
  const parts = await all(streamed.fullStream);
  const text = (type) => parts.filter((part) => part.type === type).map((part) => part.text).join('').trim();
  assert.equal(text('reasoning-delta'), 'plan it');
  assert.equal(text('text-delta'), '42');
});
