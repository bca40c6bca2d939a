// The form: what to run, as a request body.

import { nameOf } from "./completion.js";
import { byId, el, setText } from "./dom.js";

// By kind of request. `first`: the kind that a model shows best.
const PYDOC = {
  first: "completion",
  chat: ["What does json.dumps do?", "What does functools.lru_cache do?", "What is os.path.join for?"],
  completion: [
    "def read_lines(path):",
    'class Stack:\n    """A stack."""\n\n    def __init__(self):\n        self',
    "import os\nimport sys\n\ndef main():\n    parser = argparse.",
  ],
};
const NUMBERS = { first: "completion", chat: ["1 2 3"], completion: ["1 2 3", "7 8 9 7 8 9"] };
const GENERAL = {
  first: "chat",
  chat: [
    "Rename a to x and b to y, and print all the code:\n\n" +
      "def add(a, b):\n    return a + b\n\ndef mul(a, b):\n    return a * b\n",
    "Explain in three sentences how a hash table works.",
    "Write a limerick about a fast turtle.",
  ],
  completion: ["def fibonacci(n):\n", "Once upon a time"],
};

export class RequestForm {
  #form = byId("request");
  #prompt = byId("prompt");
  #example = "";
  // By name, as the operator's page has them. `max_model_len`: null where the gateway does not know.
  #models;

  constructor(models) {
    this.#models = new Map(models.map((model) => [model.model, model]));
    byId("model").replaceChildren(...models.map(({ model }) => el("option", { value: model }, model)));
    this.#form.elements.kind.value = examplesFor(models[0].model).first;
    this.#form.addEventListener("change", () => this.#showKind());
    byId("temperature").addEventListener("input", () => this.#showTemperature());
    byId("model").addEventListener("change", () => this.#showModel());
    this.#showTemperature();
    this.#showKind();
    this.#showModel();
    if (matchMedia("(max-width: 60rem)").matches) byId("settings").open = false;
  }

  get kind() {
    return this.#form.elements.kind.value;
  }

  get text() {
    return this.#prompt.value;
  }

  get maxTokens() {
    return Number(byId("max-tokens").value);
  }

  get inTurn() {
    return byId("in-turn").checked;
  }

  get speculates() {
    return byId("speculate").checked;
  }

  get path() {
    return this.kind === "chat" ? "/v1/chat/completions" : "/v1/completions";
  }

  // Whether all fields have possible values; the first wrong one gets the focus.
  valid() {
    byId("settings").open ||= !this.#form.checkValidity();
    if (!this.text) this.#prompt.focus();
    return this.text !== "" && this.#form.reportValidity();
  }

  // The body of a request. `messages`: the conversation before, for a chat.
  body(messages, speculates) {
    const prompt =
      this.kind === "chat" ? { messages: [...messages, { role: "user", content: this.text }] } : { prompt: this.text };
    return {
      model: byId("model").value,
      ...prompt,
      temperature: Number(byId("temperature").value),
      max_tokens: this.maxTokens,
      seed: Number(byId("seed").value),
      stream: true,
      return_token_ids: true,
      return_accepted: true,
      return_tree: true,
      speculation_stats: true,
      speculative: speculates ? this.#limits() : false,
    };
  }

  setRunning(running) {
    for (const id of ["run", "race", "clear"]) byId(id).disabled = running;
    byId("stop").disabled = !running;
  }

  #limits() {
    const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
    return { enabled: null, num_speculative_tokens: number("depth"), max_tree_nodes: number("nodes") };
  }

  // Its name, what drafts for it, and no more tokens than its context; by default half of it at most.
  #showModel() {
    const { model, targets, drafts, max_model_len: context } = this.#models.get(byId("model").value);
    const workers = drafts.map((draft) => [nameOf(draft.method), draft.model].filter(Boolean).join(" "));
    const own = workers.length ? workers : targets.map((target) => nameOf(target.method));
    const methods = new Set([...own, ...targets.flatMap((target) => target.beside)].filter(Boolean));
    setText(byId("served"), `${model} · drafts: ${[...methods].join(", ") || "none"}`);
    if (!context) return;
    const field = byId("max-tokens");
    field.max = context;
    field.value = Math.min(Number(field.value), Math.floor(context / 2));
  }

  #showTemperature() {
    setText(byId("temperature-value"), Number(byId("temperature").value).toFixed(2));
  }

  #showKind() {
    setText(byId("prompt-label"), this.kind === "chat" ? "Message" : "Prompt");
    const examples = examplesFor(byId("model").value)[this.kind];
    byId("examples").replaceChildren(
      ...examples.map((example) => {
        const shown = example.trimEnd().replaceAll(/\s*\n\s*/g, " ⏎ ");
        const button = el("button", { type: "button", class: "chip" }, shown);
        button.addEventListener("click", () => {
          this.#prompt.value = example;
          this.#prompt.focus();
        });
        return button;
      }),
    );
    if (this.text === this.#example) this.#prompt.value = this.#example = examples[0];
  }
}

function examplesFor(model) {
  if (model.includes("pydoc")) return PYDOC;
  return model.startsWith("table") ? NUMBERS : GENERAL;
}
