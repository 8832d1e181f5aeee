// One turn of the chat: what was asked, and the answer as it comes.

import { el, say } from "./dom.js";
import { count, rate, seconds } from "./format.js";

export class Turn {
  constructor(text) {
    this.text = text;
    this.content = "";
    this.reasoning = "";
    this.calls = []; // {id, name, arguments}
    this.finish = null;
    this.usage = null;
    this.began = performance.now();
    this.first = null;
    this.last = null;
    this.build();
  }

  build() {
    this.thought = el("div", { class: "text" });
    this.thinkingTitle = el("summary", {}, "Thinking");
    this.thinking = el("details", { class: "thinking", hidden: true }, this.thinkingTitle, this.thought);
    this.answer = el("div", { class: "text" });
    this.callList = el("div");
    this.failure = el("p", { class: "failure" });
    this.foot = el("p", { class: "foot" }, "waiting…");
    this.elements = [
      el("article", { class: "message user" }, el("h3", {}, "You"), el("div", { class: "text" }, this.text)),
      el("article", { class: "message assistant" }, el("h3", {}, "Model"), this.thinking, this.answer, this.callList, this.failure, this.foot),
    ];
  }

  /** Messages for the next request; empty when nothing came back. */
  messages() {
    if (!this.content && !this.calls.length) return [];
    const answer = { role: "assistant", content: this.content };
    if (this.calls.length) {
      answer.tool_calls = this.calls.map((call) => ({
        id: call.id,
        type: "function",
        function: { name: call.name, arguments: call.arguments },
      }));
    }
    return [{ role: "user", content: this.text }, answer];
  }

  /** One chunk of the stream. */
  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: thought, tool_calls: calls } = choice.delta;
    if (content || thought || calls) {
      this.last = performance.now();
      this.first ??= this.last;
    }
    if (thought) this.reasoning += thought;
    if (content) this.content += content;
    for (const call of calls ?? []) this.takeCall(call);
    if (choice.finish_reason) this.finish = choice.finish_reason;
  }

  takeCall(delta) {
    const call = (this.calls[delta.index] ??= { id: "", name: "", arguments: "" });
    if (delta.id) call.id = delta.id;
    if (delta.function?.name) call.name += delta.function.name;
    if (delta.function?.arguments) call.arguments += delta.function.arguments;
  }

  show() {
    this.thinking.hidden = !this.reasoning;
    say(this.thought, this.reasoning);
    say(this.thinkingTitle, this.content || this.calls.length || this.finish ? "Thought" : "Thinking…");
    append(this.answer, this.content);
    this.calls.forEach((call, index) => {
      const shown = this.callList.children[index] ?? this.callList.appendChild(newCall());
      say(shown.querySelector("code"), call.name);
      say(shown.querySelector("pre"), call.arguments);
    });
    say(this.foot, this.figures());
  }

  end(note) {
    this.finish ??= note;
    this.show();
  }

  fail(message) {
    this.finish ??= "error";
    say(this.failure, message);
    this.show();
  }

  figures() {
    if (!this.finish) return this.first === null ? "waiting…" : "…";
    const parts = [this.finish];
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens;
      parts.push(`${count(this.usage.prompt_tokens)} prompt${cached ? ` (${count(cached)} cached)` : ""}`);
      parts.push(`${count(this.usage.completion_tokens)} output`);
    }
    if (this.first !== null) parts.push(`first after ${seconds((this.first - this.began) / 1000)}`);
    const decode_s = (this.last - this.first) / 1000;
    if (this.usage?.completion_tokens > 1 && decode_s >= 0.1) {
      parts.push(`${rate((this.usage.completion_tokens - 1) / decode_s)} tok/s`);
    }
    return parts.join(" · ");
  }
}

/** Add what is new at the end, so that long answers cost no more than short ones and selections stay. */
function append(node, text) {
  if (!node.firstChild) node.append("");
  const shown = node.firstChild;
  if (text.length > shown.length) shown.appendData(text.slice(shown.length));
}

function newCall() {
  return el("div", { class: "call" }, el("p", {}, "calls ", el("code")), el("pre"));
}
