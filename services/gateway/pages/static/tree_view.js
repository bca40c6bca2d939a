// The tree of guesses that one step verified: it grows from the root, depth by depth, then collapses to what the target
// drew.

import { svg } from "./dom.js";
import { depths, kindOf, nameOf } from "./completion.js";

const ROW = 27;
const NODE = 21;
const CHARACTER = 7.3;
const PADDING = 9;
const GAP = 26;
const LONGEST = 16;
const GROW_MS = 70;
export const ANIMATION_MS = 520;

// Spaces and line ends as signs, so that every token can be seen.
export function visible(text) {
  const shown = text.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  const characters = Array.from(shown);
  return characters.length > LONGEST ? `${characters.slice(0, LONGEST - 1).join("")}…` : shown || "∅";
}

// Draw a step. `texts`: {root, guess(index), bonus}; bonus is null where the step ended with a guess.
export function drawTree(container, step, texts, animated) {
  const nodes = placed(step, texts);
  const columns = columnsOf(nodes);
  const last = columns.at(-1);
  const width = last.x + last.width + 2;
  const rows = Math.max(...nodes.map((node) => node.row)) + 1;
  const height = Math.ceil(rows * ROW);
  const drawing = svg("svg", {
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": stepWords(step),
    class: animated ? "animated" : null,
  });
  for (const node of nodes) if (node.parent) drawing.append(edge(node, columns));
  for (const node of nodes) drawing.append(box(node, columns));
  container.replaceChildren(drawing);
}

// "5 guesses verified, 3 accepted, then the target's own token."
export function stepWords(step) {
  const own = step.count > step.accepted ? "the target's own token" : "";
  if (!step.nodes.length) return `No guess verified: ${own}.`;
  const guesses = step.nodes.length === 1 ? "1 guess" : `${step.nodes.length} guesses`;
  return `${guesses} verified, ${step.accepted} accepted${own ? `, then ${own}` : ""}.`;
}

// The nodes with their depth and row: the root, the guesses, the target's own token. An accepted child has its parent's
// row, so the drawn path is straight.
function placed(step, texts) {
  const deep = depths(step.nodes);
  const root = { depth: 0, label: visible(texts.root), kind: "root", about: "the last token before the step" };
  const guesses = step.nodes.map((node, index) => ({
    depth: deep[index],
    label: visible(node.token ?? texts.guess(index)),
    kind: node.accepted ? kindOf(node.method) : "refused",
    about: `${nameOf(node.method)}, depth ${deep[index]}, ${node.accepted ? "accepted" : "refused"}`,
  }));
  const all = [root, ...guesses];
  step.nodes.forEach((node, index) => {
    guesses[index].parent = all[node.parent];
  });
  if (texts.bonus !== null) {
    const parent = guesses.findLast((_, index) => step.nodes[index].accepted) ?? root;
    const about = "the target's own token";
    all.push({ depth: parent.depth + 1, label: visible(texts.bonus), kind: "own", about, parent });
  }
  assignRows(root, all);
  return all;
}

function assignRows(root, nodes) {
  const children = new Map(nodes.map((node) => [node, []]));
  for (const node of nodes) if (node.parent) children.get(node.parent).push(node);
  let next = 0;
  const visit = (node) => {
    const below = children.get(node).sort((a, b) => (a.kind === "refused") - (b.kind === "refused"));
    node.row = next;
    if (!below.length) next++;
    below.forEach(visit);
  };
  visit(root);
}

function columnsOf(nodes) {
  const columns = [];
  for (const node of nodes) {
    const width = Array.from(node.label).length * CHARACTER + 2 * PADDING;
    columns[node.depth] ??= { width: 0 };
    columns[node.depth].width = Math.max(columns[node.depth].width, width);
  }
  let x = 1;
  for (const column of columns) {
    column.x = x;
    x += column.width + GAP;
  }
  return columns;
}

const middle = (node) => node.row * ROW + ROW / 2;

function boxWidth(node) {
  return Array.from(node.label).length * CHARACTER + 2 * PADDING;
}

function edge(node, columns) {
  const from = columns[node.parent.depth].x + boxWidth(node.parent);
  const to = columns[node.depth].x;
  const [y1, y2] = [middle(node.parent), middle(node)];
  const bend = to - GAP / 2;
  const line = `M${from} ${y1}H${to - GAP}C${bend} ${y1} ${bend} ${y2} ${to} ${y2}`;
  const path = svg("path", { d: line, class: `edge ${node.kind}` });
  delay(path, node.depth);
  return path;
}

function box(node, columns) {
  const [x, y] = [columns[node.depth].x, middle(node)];
  const group = svg(
    "g",
    { class: `node ${node.kind}` },
    svg("title", {}, node.about),
    svg("rect", { x, y: y - NODE / 2, width: boxWidth(node), height: NODE, rx: 5 }),
    svg("text", { x: x + PADDING, y: y + 4 }, node.label),
  );
  delay(group, node.depth);
  return group;
}

function delay(element, depth) {
  element.style.setProperty("--delay", `${Math.min(depth * GROW_MS, ANIMATION_MS)}ms`);
}
