// The official `openai` client for Node, as a program of its own uses it. LOCKSTEP_URL says where the server is.
import assert from 'node:assert/strict';
import { test } from 'node:test';

import OpenAI from 'openai';

const server = process.env.LOCKSTEP_URL;
const client = new OpenAI({ baseURL: `${server}/v1`, apiKey: 'unused', maxRetries: 0 });
const model = 'smollm2-135m';
const brief = { model, messages: [{ role: 'user', content: 'Hi' }], temperature: 0, max_tokens: 6 };
const hello = process.env.LOCKSTEP_HELLO;

async function running() {
  const metrics = await (await fetch(`${server}/metrics`)).text();
  return Number(metrics.match(/^vllm:num_requests_running\{.*\} (\S+)$/m)[1]);
}

async function idle() {
  while ((await running()) > 0) await new Promise((resolve) => setTimeout(resolve, 20));
}

test('a plain answer is the one bare HTTP gets, and is counted', async () => {
  const answer = await client.chat.completions.create(brief);
  assert.equal(answer.choices[0].message.content, hello);
  assert.equal(answer.usage.prompt_tokens, 31);
  assert.equal(answer.usage.completion_tokens, 6);
});

test('a stream is the same text and counts the same', async () => {
  const stream = await client.chat.completions.create({ ...brief, stream: true, stream_options: { include_usage: true } });
  let text = '';
  let usage;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? '';
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, hello);
  assert.equal(usage.total_tokens, 37);
});

test('the stream helper assembles the same answer', async () => {
  const completion = await client.chat.completions.stream(brief).finalChatCompletion();
  assert.equal(completion.choices[0].message.content, hello);
  assert.equal(completion.choices[0].finish_reason, 'length');
});

test('completions go on from token ids', async () => {
  const answer = await client.completions.create({ model, prompt: [19556], temperature: 0, max_tokens: 2 });
  assert.equal(answer.usage.prompt_tokens, 1);
});

for (const stream of [false, true]) {
  test(`a bad parameter is refused before any text (stream: ${stream})`, async () => {
    await assert.rejects(client.chat.completions.create({ ...brief, temperature: -1, stream }), (error) => {
      assert(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, 'temperature');
      return true;
    });
  });
}

test('an unknown model is not found, the known one is listed', async () => {
  await assert.rejects(client.chat.completions.create({ ...brief, model: 'gpt-7' }), OpenAI.NotFoundError);
  const names = [];
  for await (const listed of client.models.list()) names.push(listed.id);
  assert.deepEqual(names, [model]);
});

test('an aborted stream frees its slot', async () => {
  const stream = await client.chat.completions.create({ ...brief, max_tokens: 900, stream: true });
  for await (const chunk of stream) {
    if (chunk.choices[0].delta.content) {
      assert.equal(await running(), 1);
      stream.controller.abort();
    }
  }
  await idle();
});

test('a plain call that is aborted frees its slot', async () => {
  const controller = new AbortController();
  const asked = { model, prompt: 'Hello', max_tokens: 900, ignore_eos: true };
  const call = client.completions.create(asked, { signal: controller.signal });
  while ((await running()) === 0) await new Promise((resolve) => setTimeout(resolve, 20));
  controller.abort();
  await assert.rejects(call, OpenAI.APIUserAbortError);
  await idle();
});
