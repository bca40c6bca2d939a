// Acceptance of one completion: by depth, and by how many guesses a step accepted.

import { byId, el, setShare, setText, sync } from "./dom.js";
import { acceptanceOf } from "./completion.js";

// Show the counts of the steps so far; the server's own once it has sent them.
export function showAcceptance(completion) {
  const { drafted, accepted, lengths, verifications } = acceptanceOf(completion.steps);
  const server = completion.speculation;
  const tried = server?.drafted_by_depth ?? drafted;
  const taken = server?.accepted_by_depth ?? accepted;
  const reached = tried.map((count, index) => (index ? Math.min(count, taken[index - 1]) : count));
  showBars(byId("by-depth"), reached.map((count, index) => depthBar(index, count, taken[index])));
  const most = Math.max(1, ...lengths);
  showBars(byId("by-length"), lengths.map((count, length) => ({ name: length, share: count / most, value: count })));
  const total = taken.reduce((sum, count) => sum + count, 0);
  setText(byId("acceptance-words"), words(total, server?.verifications ?? verifications, server));
}

export function clearAcceptance() {
  showBars(byId("by-depth"), []);
  showBars(byId("by-length"), []);
  setText(byId("acceptance-words"), "");
}

// Given that all guesses above were accepted.
function depthBar(index, tried, accepted) {
  const share = tried ? accepted / tried : 0;
  return { name: index + 1, share, value: `${Math.round(100 * share)} %`, detail: `${accepted} of ${tried}` };
}

function words(accepted, verifications, server) {
  if (!verifications) return "Nothing was guessed.";
  const length = `${(accepted / verifications).toFixed(2)} accepted per verification`;
  return server ? `${length}, ${server.strategy}` : length;
}

function showBars(body, bars) {
  sync(
    body,
    bars,
    (bar) => bar.name,
    ({ name }) => {
      const value = el("td", { class: "value" }, el("span"), el("span", { class: "unseen" }));
      return el("tr", {}, el("th", { scope: "row" }, String(name)), el("td", { class: "bar" }, el("i")), value);
    },
    (row, bar) => {
      setShare(row.children[1].firstElementChild, bar.share);
      setText(row.children[2].firstElementChild, bar.value);
      setText(row.children[2].lastElementChild, bar.detail ? `, ${bar.detail}` : "");
      row.title = bar.detail ?? "";
    },
  );
}
