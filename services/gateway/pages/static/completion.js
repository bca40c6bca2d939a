// One completion as it arrives: its text, its tokens, who guessed each, and the steps that committed them.

export const OWN = "target";
const LOOKUPS = new Set(["ngram", "suffix"]);

// draft, lookup or own: what a method's tokens look like.
export function kindOf(method) {
  return method === OWN ? "own" : LOOKUPS.has(method) ? "lookup" : "draft";
}

export function nameOf(method) {
  return method === OWN ? "the target itself" : method.replaceAll("_", " ");
}

export class Completion {
  // The text by code points: the API counts offsets in them.
  characters = [];
  tokens = [];
  accepted = [];
  offsets = [];
  // By token: {method, depth}. Depth 0 is the target's own token.
  sources = [];
  // By target step: {first, count, accepted, nodes, parts}. `nodes`: the verified guesses, as the API has them.
  // `parts`: [kind, text] of the chunk.
  steps = [];
  // Whether offsets apply: not where the API has taken markers of reasoning or tools out of the text.
  aligned = true;
  finish = null;
  speculation = null;
  timings = null;

  take(chunk) {
    for (const choice of chunk.choices ?? []) this.#takeChoice(choice);
    this.speculation = chunk.speculation ?? this.speculation;
    this.timings = chunk.timings ?? this.timings;
  }

  get text() {
    return this.characters.join("");
  }

  // The text of one token, as far as it has come; dots where it has no place in the text.
  tokenText(index) {
    if (!this.aligned) return "…";
    return this.characters.slice(this.offsets[index], this.offsets[index + 1] ?? undefined).join("");
  }

  stepOf(token) {
    return this.steps.findIndex((step) => token < step.first + step.count);
  }

  // How many tokens each method brought, as [method, number].
  counts() {
    const counts = new Map();
    for (const { method } of this.sources) counts.set(method, (counts.get(method) ?? 0) + 1);
    return [...counts];
  }

  #takeChoice(choice) {
    const parts = textParts(choice);
    this.aligned &&= parts.every(([kind]) => kind === "content");
    for (const [kind, text] of parts) if (kind === "content") this.characters.push(...text);
    this.finish = choice.finish_reason ?? this.finish;
    const tokens = choice.token_ids ?? [];
    const first = this.tokens.length;
    this.tokens.push(...tokens);
    this.accepted.push(...(choice.accepted ?? tokens.map(() => false)));
    this.offsets.push(...(choice.text_offset ?? tokens.map(() => this.characters.length)));
    this.#addSteps(first, choice.trees ?? []);
    if (this.steps.length) this.steps.at(-1).parts.push(...parts);
  }

  // A chunk is one step, or several that arrived together: then each but the last ends with a token of the target's.
  #addSteps(first, trees) {
    let at = first;
    for (let index = 0; at < this.tokens.length; index++) {
      const nodes = trees[index];
      const last = index >= trees.length - 1;
      const guessed = (nodes ?? []).filter((node) => node.accepted);
      const count = last ? this.tokens.length - at : Math.min(guessed.length + 1, this.tokens.length - at);
      const accepted = this.accepted.slice(at, at + count).filter(Boolean).length;
      this.steps.push({ first: at, count, accepted, nodes: nodes ?? chain(accepted), parts: [] });
      for (let offset = 0; offset < count; offset++) {
        const method = guessed[offset]?.method ?? "draft";
        const own = !this.accepted[at + offset];
        this.sources.push(own ? { method: OWN, depth: 0 } : { method, depth: offset + 1 });
      }
      at += count;
    }
  }
}

// Counts by depth as the server has them, from the steps so far.
export function acceptanceOf(steps) {
  const drafted = [];
  const accepted = [];
  const lengths = [];
  let verifications = 0;
  for (const step of steps) {
    lengths[step.accepted] = (lengths[step.accepted] ?? 0) + 1;
    if (!step.nodes.length) continue;
    verifications++;
    const depth = height(step.nodes);
    for (let level = 0; level < depth; level++) {
      drafted[level] = (drafted[level] ?? 0) + 1;
      accepted[level] = (accepted[level] ?? 0) + (level < step.accepted ? 1 : 0);
    }
  }
  return { drafted, accepted, lengths: Array.from(lengths, (count) => count ?? 0), verifications };
}

export function depths(nodes) {
  const found = [0];
  for (const node of nodes) found.push(found[node.parent] + 1);
  return found.slice(1);
}

export function height(nodes) {
  return Math.max(0, ...depths(nodes));
}

// The first index at which two lists of token ids differ; null if they are equal.
export function firstDifference(left, right) {
  for (let index = 0; index < Math.max(left.length, right.length); index++) {
    if (left[index] !== right[index]) return index;
  }
  return null;
}

// What is known of a step whose tree the API does not send: the accepted guesses.
function chain(accepted) {
  const node = (_, parent) => ({ parent, token: null, accepted: true, method: "draft" });
  return Array.from({ length: accepted }, node);
}

function textParts(choice) {
  const delta = choice.delta ?? {};
  const calls = (delta.tool_calls ?? []).map((call) => (call.function?.name ?? "") + (call.function?.arguments ?? ""));
  return [
    ["reasoning", delta.reasoning_content ?? delta.reasoning ?? ""],
    ["content", choice.text ?? delta.content ?? ""],
    ["call", calls.join("")],
  ].filter(([, text]) => text);
}
