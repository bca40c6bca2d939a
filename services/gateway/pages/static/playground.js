// The playground: runs and races requests, and shows who guessed their tokens.

import { announce, byId, el, isAtEnd, setText, sync } from "./dom.js";
import { clearAcceptance, showAcceptance } from "./acceptance_view.js";
import { firstDifference, kindOf, nameOf } from "./completion.js";
import { pageSettings, requestJson, requireKey } from "./connection.js";
import { Lane } from "./lane.js";
import { RequestForm } from "./request_form.js";
import { StepView } from "./step_view.js";
import { setUpTheme } from "./theme.js";

const KILL_AFTER = 0.25; // of a race's most tokens, where the kill button starts it
const CHARTS_MS = 200;
const KINDS = [
  ["draft", "a draft"],
  ["lookup", "a lookup"],
  ["own", "the target itself"],
];

const ORDER = KINDS.map(([kind]) => kind);

class Playground {
  #form;
  #steps = new StepView();
  #messages = [];
  #lanes = [];
  #running = null;
  // The lane whose steps and acceptance are shown.
  #shown = null;
  #chartsAt = 0;
  #killing = false;

  constructor(models, settings) {
    this.#form = new RequestForm(models);
    byId("request").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#start({ race: false });
    });
    byId("race").addEventListener("click", () => this.#start({ race: true }));
    byId("stop").addEventListener("click", () => this.#running?.abort());
    byId("clear").addEventListener("click", () => this.#clear());
    byId("demo").hidden = !settings.demo;
    byId("kill").addEventListener("click", () => this.#kill());
    document.addEventListener("keydown", (event) => this.#key(event));
    this.#showLegend(null);
    requestAnimationFrame((now) => this.#frame(now));
  }

  #key(event) {
    if (event.key === "Escape") this.#running?.abort();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      this.#start({ race: event.shiftKey });
    }
  }

  async #start({ race, killAt = null }) {
    if (this.#running || !this.#form.valid()) return;
    this.#running = new AbortController();
    this.#form.setRunning(true);
    const fast = new Lane(race || this.#form.speculates);
    const lanes = race ? [new Lane(false), fast] : [fast];
    const turn = this.#addTurn(lanes);
    announce(race ? "The race runs." : "Running.");
    const text = this.#form.text;
    await this.#runAll(lanes, race, killAt);
    this.#finish(turn, lanes, text);
  }

  async #runAll(lanes, race, killAt) {
    const { signal } = this.#running;
    const { path, inTurn } = this.#form;
    const bodies = lanes.map((_, index) =>
      this.#form.body(this.#messages, race ? index === 1 : this.#form.speculates),
    );
    const fast = lanes.at(-1);
    const onChunk = (lane) => {
      if (lane !== fast || killAt === null || lane.completion.tokens.length < killAt) return;
      killAt = null;
      this.#killNow();
    };
    const run = (lane, index) => lane.run(path, bodies[index], signal, onChunk);
    if (!inTurn) await Promise.all(lanes.map(run));
    else for (const [index, lane] of lanes.entries()) if (!signal.aborted) await run(lane, index);
  }

  #finish(turn, lanes, text) {
    const fast = lanes.at(-1);
    this.#running = null;
    this.#form.setRunning(false);
    for (const lane of lanes) lane.render();
    this.#showAcceptance();
    this.#steps.finish();
    if (this.#form.kind === "chat" && !fast.error && fast.completion.text) {
      this.#messages.push({ role: "user", content: text }, { role: "assistant", content: fast.completion.text });
    }
    const words = lanes.length > 1 ? verdict(lanes, this.#form.inTurn) : endOf(fast);
    if (lanes.length > 1 || fast.kill) {
      turn.append(el("p", { class: `verdict ${words.kind}` }, el("strong", {}, words.title), ` ${words.text}`));
    }
    announce(`${words.title} ${words.text}`);
    this.#scrollDown();
  }

  #addTurn(lanes) {
    byId("welcome")?.remove();
    if (this.#form.kind === "completion") this.#clear();
    const turn = el(
      "article",
      { class: "turn" },
      el("p", { class: "asked" }, el("span", { class: "unseen" }, "Asked: "), this.#form.text),
      el("div", { class: lanes.length > 1 ? "lanes race" : "lanes" }, ...lanes.map((lane) => lane.element)),
    );
    for (const lane of lanes) {
      lane.text.element.addEventListener("click", (event) => {
        const token = lane.text.tokenAt(event);
        if (token === null) return;
        this.#show(lane);
        this.#steps.pick(lane, token);
      });
    }
    byId("turns").append(turn);
    this.#lanes = lanes;
    this.#show(lanes.at(-1));
    this.#scrollDown();
    return turn;
  }

  #show(lane) {
    if (this.#shown === lane) return;
    this.#shown = lane;
    this.#steps.follow(lane);
    this.#showAcceptance();
  }

  #showAcceptance() {
    if (!this.#shown) return;
    showAcceptance(this.#shown.completion);
    this.#showLegend(this.#shown.completion);
  }

  // Who guessed how many tokens; before there are any, the colours alone.
  #showLegend(completion) {
    const counts = completion?.counts() ?? [];
    const methods = counts.map(([method, count]) => [kindOf(method), nameOf(method), count]);
    const entries = counts.length ? methods.sort(([a], [b]) => ORDER.indexOf(a) - ORDER.indexOf(b)) : KINDS;
    sync(
      byId("legend"),
      entries,
      ([kind, name]) => `${kind} ${name}`,
      ([kind, name]) => el("li", { class: kind }, el("i", { "aria-hidden": "true" }), name, el("b")),
      (item, [, , count]) => setText(item.lastElementChild, count ? ` ${count}` : ""),
    );
  }

  #frame(now) {
    requestAnimationFrame((next) => this.#frame(next));
    if (this.#running) {
      const atEnd = isAtEnd(byId("turns"));
      for (const lane of this.#lanes) if (lane.running) lane.render();
      if (atEnd) this.#scrollDown();
      if (now - this.#chartsAt > CHARTS_MS) {
        this.#chartsAt = now;
        this.#showAcceptance();
      }
    }
    if (this.#running || this.#steps.playing) this.#steps.update(now);
  }

  #scrollDown() {
    const turns = byId("turns");
    turns.scrollTop = turns.scrollHeight;
  }

  #clear() {
    this.#messages = [];
    this.#lanes = [];
    this.#shown = null;
    byId("turns").replaceChildren();
    this.#steps.clear();
    clearAcceptance();
    this.#showLegend(null);
  }

  // While a request runs: now. Else in the middle of a race, which shows that nothing happens to the text.
  #kill() {
    if (this.#running) this.#killNow();
    else this.#start({ race: true, killAt: Math.max(1, Math.round(KILL_AFTER * this.#form.maxTokens)) });
  }

  async #killNow() {
    if (this.#killing) return;
    this.#killing = true;
    const lane = this.#lanes.at(-1);
    try {
      const { killed } = await requestJson("/demo/kill-draft", { method: "POST" });
      if (killed && lane) lane.noteKill(killed);
      this.#sayOfKill(killed ? `${killed} was killed and starts again.` : "No draft worker runs now; it starts again.");
    } catch (error) {
      this.#sayOfKill(error.message);
    } finally {
      this.#killing = false;
    }
  }

  #sayOfKill(text) {
    setText(byId("kill-hint"), text);
    announce(text);
  }
}

// Whether both outputs of a race are the same tokens, in words.
function verdict([plain, fast], inTurn) {
  if (plain.error || fast.error) return { kind: "open", title: "No result.", text: "The race did not finish." };
  const [left, right] = [plain.completion, fast.completion];
  const at = firstDifference(left.tokens, right.tokens);
  if (at === null) {
    const words = [`All ${left.tokens.length} token ids are equal.`];
    if (fast.kill) words.push(`${killWords(fast.kill)}, and nothing happened to the text.`);
    words.push(`Speculation was ${(fast.tokensPerSecond / plain.tokensPerSecond).toFixed(2)} times as fast.`);
    if (!inTurn) words.push("Both shared the target's steps; race one after the other for each one's own speed.");
    return { kind: "same", title: "Identical.", text: words.join(" ") };
  }
  const promise =
    right.speculation?.drafter_invariant === false
      ? ` The strategy ${right.speculation.strategy} does not promise the same tokens.`
      : "";
  const tokens = `${tokenWords(left, at)} without speculation and ${tokenWords(right, at)} with it`;
  return { kind: "different", title: "Different.", text: `Token ${at + 1} is ${tokens}.${promise}` };
}

function tokenWords(completion, index) {
  if (index >= completion.tokens.length) return "missing";
  return `${completion.tokens[index]} (“${completion.tokenText(index)}”)`;
}

function endOf(lane) {
  if (lane.error) return { kind: "open", title: "Ended.", text: lane.error };
  const count = lane.completion.tokens.length;
  const speed = `${count} tokens at ${lane.tokensPerSecond.toFixed(0)} tokens per second.`;
  if (!lane.kill) return { kind: "same", title: "Finished.", text: speed };
  const text = `${killWords(lane.kill)}; ${count - lane.kill.token} more tokens followed.`;
  return { kind: "same", title: "The text went on.", text };
}

function killWords({ worker, token }) {
  return `${worker} was killed after token ${token}`;
}

async function main() {
  setUpTheme();
  try {
    const settings = await pageSettings();
    if (settings.requires_key) await requireKey();
    new Playground((await requestJson("/operator/state")).models, settings);
  } catch (error) {
    byId("welcome").replaceChildren(el("p", { class: "trouble", role: "alert" }, error.message));
  }
}

main();
