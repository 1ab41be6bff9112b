import { draw, markOf, visible } from "./dom.js";
import { DEEPEST, originOf, sourceInWords, sourceOf } from "./runs.js";
/* The tree of one cycle: what the head drafted, and the path that the model accepted. */

export const EXAMPLE_CYCLE = {
  tokens: [
    { text: "\n    ", from: "draft", depth: 1 },
    { text: "if", from: "draft", depth: 2 },
    { text: " n", from: "draft", depth: 3 },
    { text: " <", from: "bonus" },
  ],
  tree: {
    tokens: [":", "\n    ", " #", "if", "return", " n", " not", " =="],
    parents: [-1, 0, 0, 1, 1, 3, 3, 5],
    accepted: [0, 1, 3, 5],
  },
};
const ROW = { least: 22, most: 46 };
const GAP = { least: 14, most: 72 }; // between columns
const HEAD_HEIGHT = 26;
const MARK = 13; // width of the mark that tells who proposed a node
const LETTER = 7.25; // width of a letter at the font size of tree.css

/** The tree of a pass without drafts: only the text before. */
export function singleStep(before) {
  return { tokens: [before], parents: [-1], accepted: [0] };
}

/**
 * Nodes with their column (depth) and row. A parent stands level with its accepted child, else amid its children.
 * What the pass added below the last accepted node is a node too: the bonus token.
 */
function layoutTree(tree, tokens) {
  const nodes = tree.tokens.map((text, index) => {
    return { text, parent: tree.parents[index], state: "rejected", children: [], source: sourceOf(tree, index) };
  });
  tree.accepted.forEach((index) => (nodes[index].state = "accepted"));
  nodes[0].state = "root"; // the token before the tree
  const added = tokens.at(-1);
  if (added && added.from !== "draft") {
    nodes.push({ text: added.text, parent: tree.accepted.at(-1), state: originOf(added), children: [] });
  }
  nodes.forEach((node) => {
    node.depth = node.parent < 0 ? 0 : nodes[node.parent].depth + 1;
    if (node.parent >= 0) nodes[node.parent].children.push(node);
  });
  return { nodes, rows: placeRows(nodes[0]), columns: Math.max(...nodes.map((node) => node.depth)) + 1 };
}

/** Sets the rows of a node and all below it, from row `next` on. Returns the row after the last leaf. */
function placeRows(node, next = 0) {
  if (!node.children.length) {
    node.row = next;
    return next + 1;
  }
  for (const child of node.children) next = placeRows(child, next);
  const kept = node.children.find((child) => child.state !== "rejected");
  node.row = kept ? kept.row : (node.children[0].row + node.children.at(-1).row) / 2;
  return next;
}

/** Draws a cycle into the box; `calm` leaves out the movement. */
export function drawTree(box, tree, tokens, label, calm) {
  const { nodes, rows, columns } = layoutTree(tree, tokens);
  const places = placeColumns(nodes, columns, box.clientWidth);
  const row = Math.min(Math.max((box.clientHeight - HEAD_HEIGHT) / rows, ROW.least), ROW.most);
  const height = Math.max(box.clientHeight, rows * row + HEAD_HEIGHT);
  const top = HEAD_HEIGHT + (height - HEAD_HEIGHT - rows * row) / 2;
  for (const node of nodes) {
    node.x = places[node.depth];
    node.y = top + (node.row + 0.5) * row;
  }
  const width = Math.max(box.clientWidth, ...nodes.map((node) => node.x + node.width + 2));
  const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  svg.classList.toggle("calm", calm);
  svg.append(...columnHeads(places, nodes, width));
  const kept = (node) => node.state !== "rejected";
  for (const group of [nodes.filter((node) => !kept(node)), nodes.filter(kept)]) {
    svg.append(...group.filter((node) => node.parent >= 0).map((node) => drawEdge(nodes[node.parent], node)));
    svg.append(...group.map((node) => drawNode(node, Math.min(row - 6, 26))));
  }
  box.replaceChildren(svg);
  const end = nodes.findLast(kept);
  box.scrollTop = end.y - box.clientHeight / 2; // of a tree that is larger than its box
}

/** Shortens the nodes' texts to fit the space. Returns where every column begins. */
function placeColumns(nodes, columns, space) {
  let widths = [];
  for (let letters = 14; letters >= 4; letters -= 1) {
    for (const node of nodes) {
      node.label = shorten(visible(node.text), letters);
      node.width = Math.max(textWidth(node.label) * LETTER + 16, 26) + (node.source ? MARK : 0);
    }
    widths = Array.from({ length: columns }, () => 0);
    for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth], node.width);
    if (sum(widths) + GAP.least * (columns - 1) <= space - 4) break;
  }
  const gap = columns > 1 ? (space - 4 - sum(widths)) / (columns - 1) : 0;
  const step = Math.min(Math.max(gap, GAP.least), GAP.most);
  return widths.map((_, depth) => 2 + sum(widths.slice(0, depth)) + step * depth);
}

function sum(numbers) {
  return numbers.reduce((total, number) => total + number, 0);
}

function columnHeads(places, nodes, width) {
  const drafts = nodes.filter((node) => node.state === "rejected" || node.state === "accepted");
  const deepest = Math.max(0, ...drafts.map((node) => node.depth));
  return places.map((x, depth) => {
    const room = (places[depth + 1] ?? Infinity) - x;
    const place = width - x < 50 ? { x: width, "text-anchor": "end" } : { x: x + 2 };
    return draw("text", { ...place, y: 14, class: "column-head" }, columnName(depth, deepest, room));
  });
}

function columnName(depth, deepest, room) {
  if (depth === 0) return room < 46 ? "" : "so far";
  if (depth > deepest) return deepest ? "bonus" : "next";
  return room < 50 ? `${depth}` : `depth ${depth}`;
}

function drawEdge(from, to) {
  const [x1, x2] = [from.x + from.width, to.x];
  const bend = Math.max((x2 - x1) / 2, 8);
  const path = `M${x1} ${from.y}C${x1 + bend} ${from.y} ${x2 - bend} ${to.y} ${x2} ${to.y}`;
  const edge = draw("path", { d: path, class: `edge ${to.state} ${colourOf(to)}`, pathLength: 1 });
  edge.style.setProperty("--level", to.depth);
  return edge;
}

function drawNode(node, height) {
  const group = draw("g", { class: `node ${node.state} ${colourOf(node)}` });
  const box = { x: node.x, y: node.y - height / 2, width: node.width, height, rx: Math.min(height / 2, 7) };
  const middle = node.x + (node.width + (node.source ? MARK : 0)) / 2;
  const text = draw("text", { x: middle, y: node.y + 4, "text-anchor": "middle" }, node.label);
  group.style.setProperty("--level", node.depth);
  group.append(draw("title", {}, JSON.stringify(node.text) + sourceInWords(node.source)), draw("rect", box), text);
  if (node.source) group.append(draw("path", { d: markOf(node.source, node.x + 12, node.y), class: "mark" }));
  return group;
}

function colourOf(node) {
  return node.source ?? (node.state === "accepted" ? `d${Math.min(node.depth, DEEPEST)}` : "");
}

/** Letters that a text takes in a fixed-width font: those of East Asian scripts take two. */
function textWidth(text) {
  return [...text].reduce((width, letter) => width + (letter.codePointAt(0) >= 0x2e80 ? 2 : 1), 0);
}

/** The text, cut to a number of letters. */
function shorten(text, most) {
  if (textWidth(text) <= most) return text;
  let kept = "";
  for (const letter of text) {
    if (textWidth(kept + letter) > Math.max(most - 1, 1)) break;
    kept += letter;
  }
  return `${kept}…`;
}
