// What every test here needs: where the server is, what its scripted model says, and when nothing runs any more.
//
// The model says known text for a trigger in the prompt (tests/support/scripted.py): <|s05|> is "ABCDEFGH", <|s01|>
// never ends, <|s03|> thinks "plan it" and answers 42, <|s04|> calls add({a: 1, s: "é\n"}). Where a form is enforced,
// <|s12|> thinks "a" and is then led by the schema alone, which therefore must be a finite one.

import assert from 'node:assert/strict';
import { setTimeout as sleep } from 'node:timers/promises';

export const URL = process.env.HEADRACE_URL;
assert.ok(URL, 'HEADRACE_URL names no server');
export const MODEL = 'm';
export const ALPHABET = 'ABCDEFGH';
export const CALL = { a: 1, s: 'é\n' };
export const NO_RETRIES = { apiKey: 'none', maxRetries: 0, timeout: 90_000 };

export const user = (script) => [{ role: 'user', content: `<|${script}|>` }];

export const ADD_SCHEMA = {
  type: 'object',
  properties: { a: { type: 'integer' }, s: { type: 'string' } },
  required: ['a', 's'],
  additionalProperties: false,
};

/** Tokens within which any answer of a small, finite schema ends, white space included. */
export const FORM_TOKENS = 600;

/** Collect an async iterable. */
export async function all(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}

/** Wait until no request runs or waits; a stream that was left must not go on. */
export async function untilIdle() {
  for (let attempt = 0; attempt < 600; attempt += 1) {
    const text = await (await fetch(`${URL}/metrics`)).text();
    const sum = (name) =>
      [...text.matchAll(new RegExp(`^${name}(?:{[^}]*})? (\\S+)$`, 'gm'))].reduce((total, found) => total + +found[1], 0);
    if (sum('vllm:num_requests_running') + sum('vllm:num_requests_waiting') === 0) return;
    await sleep(50);
  }
  assert.fail('requests still run after their client has left');
}
