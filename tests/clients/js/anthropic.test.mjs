// The official Anthropic SDK for JavaScript: messages, streams, tool use, thinking, structured output, errors.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import Anthropic from '@anthropic-ai/sdk';

import { ADD_SCHEMA, ALPHABET, CALL, FORM_TOKENS, MODEL, NO_RETRIES, URL, all, untilIdle, user } from './support.mjs';

const client = new Anthropic({ baseURL: URL, ...NO_RETRIES });
const RAIN_SCHEMA = {
  type: 'object', properties: { rain: { type: 'boolean' } }, required: ['rain'], additionalProperties: false,
};
const TOOLS = [{ name: 'add', description: 'Adds.', input_schema: ADD_SCHEMA }];

const body = (script, more = {}) => ({ model: MODEL, max_tokens: 100, messages: user(script), temperature: 0, ...more });

test('models are listed', async () => {
  assert.deepEqual((await all(client.models.list())).map((model) => model.id), [MODEL]);
});

test('a message, whole and streamed, and its count', async () => {
  const message = await client.messages.create(body('s05'));
  assert.deepEqual(message.content.map((block) => block.text), [ALPHABET]);
  assert.equal(message.stop_reason, 'end_turn');
  const counted = await client.messages.countTokens({ model: MODEL, messages: user('s05') });
  assert.equal(counted.input_tokens, message.usage.input_tokens + (message.usage.cache_read_input_tokens ?? 0));

  const stream = client.messages.stream(body('s05'));
  let text = '';
  stream.on('text', (delta) => (text += delta));
  const final = await stream.finalMessage();
  assert.equal(text, ALPHABET);
  assert.equal(final.usage.output_tokens, 9);
});

test('tool use, whole and streamed', async () => {
  for (const message of [
    await client.messages.create(body('s04', { tools: TOOLS })),
    await client.messages.stream(body('s04', { tools: TOOLS })).finalMessage(),
  ]) {
    assert.equal(message.stop_reason, 'tool_use');
    const use = message.content.find((block) => block.type === 'tool_use');
    assert.equal(use.name, 'add');
    assert.deepEqual(use.input, CALL);
  }
});

test('a tool result goes back', async () => {
  const asked = await client.messages.create(body('s04', { tools: TOOLS }));
  const use = asked.content.find((block) => block.type === 'tool_use');
  const result = { type: 'tool_result', tool_use_id: use.id, content: [{ type: 'text', text: '3' }] };
  const messages = [...user('s04'), { role: 'assistant', content: asked.content }, { role: 'user', content: [result] }];
  const answer = await client.messages.create(body('s04', { messages, tools: TOOLS, tool_choice: { type: 'none' } }));
  assert.equal(answer.type, 'message');
});

test('a forced call fits its schema', async () => {
  const tools = [{ name: 'report', input_schema: RAIN_SCHEMA }];
  const more = { tools, tool_choice: { type: 'tool', name: 'report' }, max_tokens: FORM_TOKENS };
  const message = await client.messages.stream(body('s12', more)).finalMessage();
  assert.equal(typeof message.content.find((block) => block.type === 'tool_use').input.rain, 'boolean');
});

test('thinking is a block of its own', async () => {
  const message = await client.messages.stream(body('s03')).finalMessage();
  assert.deepEqual(message.content.map((block) => block.type), ['thinking', 'text']);
  assert.equal(message.content[0].thinking.trim(), 'plan it');
  assert.equal(message.content[1].text.trim(), '42');
});

test('an abort in mid stream ends the request', async () => {
  const stream = client.messages.stream(body('s01', { max_tokens: 7000 }));
  stream.on('text', () => stream.abort());
  await assert.rejects(stream.done(), Anthropic.APIUserAbortError);
  await untilIdle();
});

test('the form of the answer is enforced', async () => {
  const format = { type: 'json_schema', schema: RAIN_SCHEMA };
  const message = await client.messages.create(body('s12', { output_config: { format }, max_tokens: FORM_TOKENS }));
  assert.equal(typeof JSON.parse(message.content.find((block) => block.type === 'text').text).rain, 'boolean');
});

test('errors are the SDK\'s own', async () => {
  await assert.rejects(client.messages.create(body('s05', { temperature: 9 })), (error) => {
    assert.ok(error instanceof Anthropic.BadRequestError);
    assert.equal(error.error.error.type, 'invalid_request_error');
    return true;
  });
  await assert.rejects(client.messages.create(body('s05', { model: 'other' })), Anthropic.NotFoundError);
});
