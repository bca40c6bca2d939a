// The step that is looked at: its tree, in words too, and its tokens marked in the text. It follows a running lane
// until somebody chooses a step.

import { byId, setText } from "./dom.js";
import { drawTree, stepWords } from "./tree_view.js";

const DWELL_MS = 750;

export class StepView {
  #lane = null;
  #shown = -1;
  #shownAt = 0;
  #following = false;
  #playing = false;
  #slider = byId("step");
  #play = byId("play");
  #longest = byId("longest");

  constructor() {
    this.#slider.addEventListener("input", () => {
      this.#choose();
      this.show(Number(this.#slider.value) - 1, false);
    });
    this.#longest.addEventListener("click", () => {
      this.#choose();
      this.#showLongest();
    });
    this.#play.addEventListener("click", () => this.#setPlaying(!this.#playing));
  }

  // Forget the lane.
  clear() {
    this.#lane = null;
    this.#shown = -1;
    this.#setPlaying(false);
    this.#showRange();
    byId("tree").replaceChildren();
    setText(byId("step-words"), "No step yet.");
  }

  // Show the steps of this lane from now on.
  follow(lane) {
    this.#lane?.text.mark(null);
    this.#lane = lane;
    this.#shown = -1;
    this.#following = true;
    this.#setPlaying(false);
    this.update(performance.now());
  }

  // Show the lane of a text, at the step that committed one of its tokens.
  pick(lane, token) {
    if (this.#lane !== lane) this.follow(lane);
    this.#choose();
    this.show(lane.completion.stepOf(token), false);
  }

  get playing() {
    return this.#playing;
  }

  // To be called with each frame while the lane runs or steps are played. `now`: as performance.now().
  update(now) {
    const steps = this.#steps();
    this.#showRange();
    if (!steps.length || now - this.#shownAt < DWELL_MS) return;
    if (this.#playing) this.#playNext(steps);
    else if (this.#following && this.#lane.running) this.show(newest(steps), true);
  }

  // The lane has ended: show its longest run among steps that refused a guess, too, if there is one.
  finish() {
    this.#showRange();
    if (!this.#following) return;
    this.#following = false;
    if (!this.#showLongest((step) => step.accepted && step.nodes.length > step.accepted)) this.#showLongest();
  }

  // Show the first of the steps with the most accepted guesses. Return whether there is one.
  #showLongest(eligible = () => true) {
    const steps = this.#steps();
    const longest = Math.max(...steps.filter(eligible).map((step) => step.accepted));
    const index = steps.findIndex((step) => eligible(step) && step.accepted === longest);
    this.show(index, true);
    return index >= 0;
  }

  show(index, animated) {
    const steps = this.#steps();
    if (index === this.#shown || index < 0 || index >= steps.length) return;
    const [step, completion] = [steps[index], this.#lane.completion];
    this.#shown = index;
    this.#shownAt = performance.now();
    const own = step.count > step.accepted;
    const texts = {
      root: step.first ? completion.tokenText(step.first - 1) : "prompt",
      guess: (number) => completion.tokenText(step.first + number),
      bonus: own ? completion.tokenText(step.first + step.count - 1) : null,
    };
    drawTree(byId("tree"), step, texts, animated);
    this.#lane.text.mark(step);
    this.#slider.value = index + 1;
    const words = `${index + 1} of ${steps.length}. ${stepWords(step)}`;
    this.#slider.setAttribute("aria-valuetext", words);
    setText(byId("step-words"), words);
  }

  #steps() {
    return this.#lane?.completion.steps ?? [];
  }

  // As far as the slider goes, and whether there is anything to choose.
  #showRange() {
    const count = this.#steps().length;
    this.#slider.max = Math.max(1, count);
    for (const control of [this.#slider, this.#play, this.#longest]) control.disabled = !count;
  }

  #choose() {
    this.#following = false;
    this.#setPlaying(false);
  }

  #setPlaying(playing) {
    if (playing && this.#shown >= this.#steps().length - 1) this.#shown = -1;
    this.#following &&= !playing;
    this.#playing = playing;
    this.#play.setAttribute("aria-pressed", String(playing));
    setText(this.#play, playing ? "Pause" : "Play");
  }

  #playNext(steps) {
    if (this.#shown + 1 >= steps.length) this.#setPlaying(false);
    else this.show(this.#shown + 1, true);
  }
}

// The newest step with guesses; the newest one if there is none.
function newest(steps) {
  const last = steps.findLastIndex((step) => step.nodes.length);
  return last < 0 ? steps.length - 1 : last;
}
