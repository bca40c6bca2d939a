// One request of a run: its speed while it runs, its text, its end.

import { el, setShare, setText } from "./dom.js";
import { Completion } from "./completion.js";
import { requestStream } from "./connection.js";
import { TokenText } from "./token_text.js";

export class Lane {
  completion = new Completion();
  error = null;
  // {worker, token}: a draft worker that was killed, and how many tokens there were.
  kill = null;
  #began = null;
  #ended = null;
  #maxTokens = 1;
  #speed = el("strong", {}, "–");
  #detail = el("p", { class: "detail" });
  #meter = el("div", { class: "meter", "aria-hidden": "true" }, el("i"));
  #trouble = el("p", { class: "trouble", role: "alert", hidden: true });

  constructor(speculates) {
    const title = speculates ? "Speculation on" : "Speculation off";
    this.text = new TokenText(this.completion);
    const speed = el("p", { class: "speed" }, this.#speed, " tokens/s");
    const words = el("div", { class: "lane-title" }, el("h3", {}, title), speed);
    this.element = el(
      "section",
      { class: speculates ? "lane" : "lane plain", "aria-label": title },
      el("div", { class: "lane-head" }, words, this.#meter),
      this.text.element,
      this.#trouble,
      this.#detail,
    );
    this.render();
  }

  get running() {
    return this.#began !== null && this.#ended === null;
  }

  get seconds() {
    return this.#began === null ? 0 : ((this.#ended ?? performance.now()) - this.#began) / 1000;
  }

  get tokensPerSecond() {
    return this.seconds ? this.completion.tokens.length / this.seconds : 0;
  }

  // Run the request to its end. Errors are shown and kept in `error`. `onChunk` is called after each chunk.
  async run(path, body, signal, onChunk) {
    this.#maxTokens = body.max_tokens;
    this.#began = performance.now();
    this.text.element.setAttribute("aria-busy", "true");
    try {
      for await (const chunk of requestStream(path, body, signal)) {
        this.completion.take(chunk);
        onChunk(this);
      }
    } catch (error) {
      this.error = signal.aborted ? "stopped" : error.message;
    } finally {
      this.#ended = performance.now();
      this.text.element.removeAttribute("aria-busy");
      this.render();
    }
  }

  // A draft worker was killed now.
  noteKill(worker) {
    this.render();
    this.kill = { worker, token: this.completion.tokens.length };
    this.text.note(`${worker} killed here`);
  }

  render() {
    this.text.render();
    const { tokens, finish } = this.completion;
    if (this.#began !== null) setText(this.#speed, this.tokensPerSecond.toFixed(this.tokensPerSecond < 100 ? 1 : 0));
    setShare(this.#meter, finish ? 1 : tokens.length / this.#maxTokens);
    setText(this.#detail, this.#words());
    this.#trouble.hidden = this.error === null || this.error === "stopped";
    if (!this.#trouble.hidden) setText(this.#trouble, this.error);
  }

  #words() {
    if (this.#began === null) return "waits";
    const count = this.completion.tokens.length;
    const words = [`${count} ${count === 1 ? "token" : "tokens"}`, `${this.seconds.toFixed(2)} s`];
    const steps = this.completion.steps.length;
    if (steps) words.push(`${(count / steps).toFixed(2)} tokens per step`);
    if (this.error === "stopped") words.push("stopped");
    if (this.completion.finish) words.push(`finish reason: ${this.completion.finish}`);
    return words.join(" · ");
  }
}
