// The official OpenAI SDK for JavaScript: chats, streams, tools, reasoning, structured output, Responses, errors.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import OpenAI from 'openai';
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';

import { ADD_SCHEMA, ALPHABET, CALL, FORM_TOKENS, MODEL, NO_RETRIES, URL, all, untilIdle, user } from './support.mjs';

const client = new OpenAI({ baseURL: `${URL}/v1`, ...NO_RETRIES });
const TOOLS = [{ type: 'function', function: { name: 'add', parameters: ADD_SCHEMA } }];
const Weather = z.object({ sky: z.enum(['clear', 'grey']), rain: z.boolean() });

const chat = (script, more = {}) =>
  client.chat.completions.create({ model: MODEL, messages: user(script), temperature: 0, ...more });

test('models are listed and retrieved', async () => {
  assert.deepEqual((await all(client.models.list())).map((model) => model.id), [MODEL]);
  await assert.rejects(client.models.retrieve('other'), OpenAI.NotFoundError);
});

test('a chat and a completion', async () => {
  const answer = await chat('s05');
  assert.equal(answer.choices[0].message.content, ALPHABET);
  assert.equal(answer.choices[0].finish_reason, 'stop');
  assert.equal(answer.usage.total_tokens, 13);
  const completion = await client.completions.create({ model: MODEL, prompt: '<|s05|><|assistant|>', temperature: 0 });
  assert.equal(completion.choices[0].text, ALPHABET);
});

test('a streamed chat ends with its usage', async () => {
  const chunks = await all(await chat('s05', { stream: true, stream_options: { include_usage: true } }));
  assert.equal(chunks.flatMap((chunk) => chunk.choices).map((choice) => choice.delta.content ?? '').join(''), ALPHABET);
  assert.equal(chunks.at(-1).usage.completion_tokens, 9);
  assert.deepEqual(chunks.at(-1).choices, []);
});

test('an abort in mid stream ends the request', async () => {
  const stream = await chat('s01', { stream: true });
  let seen = 0;
  for await (const chunk of stream) {
    assert.equal(chunk.object, 'chat.completion.chunk');
    seen += 1;
    if (seen === 5) stream.controller.abort();
  }
  assert.ok(seen >= 5);
  await untilIdle();
});

test('an abort before the answer ends the request', async () => {
  const controller = new AbortController();
  const answer = client.chat.completions.create({ model: MODEL, messages: user('s01') }, { signal: controller.signal });
  setTimeout(() => controller.abort(), 300);
  await assert.rejects(answer, OpenAI.APIUserAbortError);
  await untilIdle();
});

test('tool calls, whole and streamed', async () => {
  const answer = await chat('s04', { tools: TOOLS });
  const [call] = answer.choices[0].message.tool_calls;
  assert.equal(answer.choices[0].finish_reason, 'tool_calls');
  assert.equal(call.function.name, 'add');
  assert.deepEqual(JSON.parse(call.function.arguments), CALL);

  const runner = client.chat.completions.stream({ model: MODEL, messages: user('s04'), temperature: 0, tools: TOOLS });
  const final = await runner.finalChatCompletion();
  assert.deepEqual(JSON.parse(final.choices[0].message.tool_calls[0].function.arguments), CALL);
});

test('a forced call fits its schema, also strictly', async () => {
  const schema = z.toJSONSchema(Weather);
  delete schema.$schema;
  const tools = [{ type: 'function', function: { name: 'report', strict: true, parameters: schema } }];
  const answer = await chat('s12', { tools, tool_choice: 'required', max_tokens: FORM_TOKENS });
  const [call] = answer.choices[0].message.tool_calls;
  Weather.parse(JSON.parse(call.function.arguments));
});

test('the tool runner carries results back', async () => {
  let given;
  const tools = [{
    type: 'function',
    function: { name: 'add', parameters: ADD_SCHEMA, parse: JSON.parse, function: (value) => ((given = value), '3') },
  }];
  const runner = client.chat.completions.runTools(
    { model: MODEL, messages: user('s04'), temperature: 0, tools },
    { maxChatCompletions: 2 },
  );
  await runner.done();
  assert.deepEqual(given, CALL);
  assert.equal(runner.messages.at(2).role, 'tool');
});

test('reasoning is apart from the answer', async () => {
  const answer = await chat('s03');
  assert.equal(answer.choices[0].message.content.trim(), '42');
  assert.equal(answer.choices[0].message.reasoning_content.trim(), 'plan it');
  const chunks = await all(await chat('s03', { stream: true }));
  const deltas = chunks.flatMap((chunk) => chunk.choices).map((choice) => choice.delta);
  assert.equal(deltas.map((delta) => delta.reasoning_content ?? '').join('').trim(), 'plan it');
  assert.equal(deltas.map((delta) => delta.content ?? '').join('').trim(), '42');
});

test('a zod schema is enforced and parsed', async () => {
  const answer = await client.chat.completions.parse({
    model: MODEL, messages: user('s12'), temperature: 0, max_tokens: FORM_TOKENS,
    response_format: zodResponseFormat(Weather, 'weather'),
  });
  Weather.parse(answer.choices[0].message.parsed);
});

test('responses: whole, streamed, parsed, continued', async () => {
  const request = { model: MODEL, input: '<|s05|>', temperature: 0 };
  const first = await client.responses.create(request);
  assert.equal(first.output_text, ALPHABET);
  const second = await client.responses.create({ model: MODEL, input: 'more', previous_response_id: first.id, temperature: 0 });
  assert.equal(second.status, 'completed');

  const stream = client.responses.stream(request);
  const events = await all(stream);
  assert.equal(events.at(0).type, 'response.created');
  assert.equal(events.at(-1).type, 'response.completed');
  assert.deepEqual(events.map((event) => event.sequence_number), events.map((_, index) => index));
  assert.equal((await stream.finalResponse()).output_text, ALPHABET);

  const parsed = await client.responses.parse({
    model: MODEL, input: '<|s12|>', temperature: 0, max_output_tokens: FORM_TOKENS,
    text: { format: zodTextFormat(Weather, 'weather') },
  });
  Weather.parse(parsed.output_parsed);
});

test('responses: a tool call and reasoning in the stream', async () => {
  const tools = [{ type: 'function', name: 'add', parameters: ADD_SCHEMA, strict: false }];
  const called = await client.responses.stream({ model: MODEL, input: '<|s04|>', temperature: 0, tools }).finalResponse();
  const call = called.output.find((item) => item.type === 'function_call');
  assert.deepEqual(JSON.parse(call.arguments), CALL);

  const thought = await client.responses.stream({ model: MODEL, input: '<|s03|>', temperature: 0 }).finalResponse();
  assert.equal(thought.output[0].type, 'reasoning');
  assert.equal(thought.output_text.trim(), '42');
});

test('responses: a function of a namespace is called and answered', async () => {
  const close = {
    type: 'function', name: 'close', strict: true,
    parameters: { type: 'object', properties: { now: { type: 'boolean' } }, required: ['now'], additionalProperties: false },
  };
  const tools = [{ type: 'namespace', name: 'agents', description: 'Helpers.', tools: [close] }];
  const request = { model: MODEL, input: '<|s12|>', temperature: 0, max_output_tokens: FORM_TOKENS, tools };
  const asked = await client.responses.stream({ ...request, tool_choice: 'required' }).finalResponse();
  const call = asked.output.find((item) => item.type === 'function_call');
  assert.deepEqual([call.namespace, call.name], ['agents', 'close']);
  assert.equal(typeof JSON.parse(call.arguments).now, 'boolean');

  const output = { type: 'function_call_output', call_id: call.call_id, output: 'closed' };
  const answer = await client.responses.create({ ...request, input: [...user('s05'), ...asked.output, output] });
  assert.equal(answer.output_text, ALPHABET);
});

test('an abort in a responses stream ends the request', async () => {
  const stream = await client.responses.create({ model: MODEL, input: '<|s01|>', temperature: 0, stream: true });
  for await (const event of stream) if (event.type === 'response.output_text.delta') break;
  await untilIdle();
});

test('errors carry code and param', async () => {
  await assert.rejects(chat('s05', { temperature: 9 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, 'temperature');
    assert.equal(error.type, 'invalid_request_error');
    assert.ok(error.requestID);
    return true;
  });
  await assert.rejects(chat('s05', { model: 'other' }), (error) => error.code === 'model_not_found');
});
