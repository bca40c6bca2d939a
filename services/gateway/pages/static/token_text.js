// A completion's text, each token coloured by who guessed it.

import { el, isAtEnd, setText } from "./dom.js";
import { kindOf, nameOf } from "./completion.js";

export class TokenText {
  #completion;
  #spans = [];
  // Tokens before this one have their whole text.
  #whole = 0;
  #byStep = false;
  #marked = [];

  constructor(completion) {
    this.#completion = completion;
    this.element = el("div", { class: "text", role: "group", "aria-label": "Text", tabindex: "0" });
  }

  // Show what has come since the last call. The end stays in sight if it was.
  render() {
    const follows = isAtEnd(this.element);
    if (this.#completion.aligned) this.#renderTokens();
    else this.#renderSteps();
    if (follows) this.element.scrollTop = this.element.scrollHeight;
  }

  #renderTokens() {
    const { tokens, offsets, characters } = this.#completion;
    for (let index = this.#whole; index < tokens.length; index++) {
      setText(this.#span(index), this.#completion.tokenText(index));
      const next = offsets[index + 1];
      if (next !== undefined && next <= characters.length && index === this.#whole) this.#whole++;
    }
  }

  // Mark the tokens of one step.
  mark(step) {
    for (const span of this.#marked) span.classList.remove("marked");
    this.#marked = step && !this.#byStep ? this.#spans.slice(step.first, step.first + step.count) : [];
    for (const span of this.#marked) span.classList.add("marked");
  }

  // Write a note between the text so far and what follows.
  note(text) {
    this.element.append(el("span", { class: "note" }, text));
  }

  // The token at which an event happened; null elsewhere.
  tokenAt(event) {
    const index = event.target.closest?.(".token")?.dataset.index;
    return index === undefined ? null : Number(index);
  }

  #span(index) {
    if (this.#spans[index]) return this.#spans[index];
    const { method, depth } = this.#completion.sources[index];
    const about = depth ? `${nameOf(method)}, depth ${depth}` : nameOf(method);
    const span = el("span", {
      class: `token ${kindOf(method)}`,
      title: about,
      "data-depth": Math.min(depth, 8),
      "data-index": index,
    });
    this.#spans[index] = span;
    this.element.append(span);
    return span;
  }

  // Where tokens have no place in the text: one span for each part of a step's text.
  #renderSteps() {
    if (!this.#byStep) {
      this.element.replaceChildren();
      this.#byStep = true;
      this.#spans = [];
    }
    const { steps } = this.#completion;
    const parts = steps.flatMap((step) => step.parts.map(([kind, text]) => [kind, text, step.accepted]));
    for (const [kind, text, accepted] of parts.slice(this.#spans.length)) {
      const span = el("span", { class: `part ${kind} ${accepted ? "draft" : "own"}` }, text);
      this.#spans.push(span);
      this.element.append(span);
    }
  }
}
