"use strict";
// A step's draft tree as SVG: depth goes to the right, siblings stand below each other.

const ROW = 30;
const GAP = 24;
const STUB = 18; // of an edge that goes on in the next line
const LEADING = 8;
const PAD = 9;
const HEIGHT = 22;
const LETTER = 7.3; // of the 12 px monospace face, at most
const LONGEST = 16; // letters of a node

function svg(name, attributes, text) {
  const found = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  if (text !== undefined) found.textContent = text;
  return found;
}

// A token so that its spaces can be seen.
function visible(text) {
  const shown = text.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  const letters = [...shown];
  return letters.length > LONGEST ? letters.slice(0, LONGEST - 1).join("") + "…" : shown || "∅";
}

// Nodes of a step: those of its tree, and behind the kept path the token that the model chose itself. That one is in the
// tree already where the text was cut there, at its end or at the most tokens.
function nodesOf(step, isEnd) {
  const { parents, texts, kept } = step.tree;
  const isKept = new Set(kept);
  const nodes = texts.map((text, index) => ({
    label: visible(text),
    parent: parents[index],
    kind: index === 0 ? "root" : isKept.has(index) ? "kept" : "lost",
    children: [],
  }));
  const last = step.tokens.at(-1);
  const same = step.tree.ids.findIndex((id, index) => index > 0 && parents[index] === kept.at(-1) && id === last.id);
  const label = isEnd && !last.text ? "end" : visible(last.text);
  if (same > 0) Object.assign(nodes[same], { label, kind: "own" });
  else nodes.push({ label, parent: kept.at(-1), kind: "own", children: [] });
  nodes.forEach((node, index) => {
    node.depth = index === 0 ? 0 : nodes[node.parent].depth + 1;
    if (index > 0) nodes[node.parent].children.push(node);
  });
  // the path that was kept comes first, so that it runs along the top
  const weight = { kept: 0, own: 0, lost: 1 };
  for (const node of nodes) node.children.sort((a, b) => weight[a.kind] - weight[b.kind]);
  return nodes;
}

// Gives every node its place; returns the drawing's size. Depths that don't fit beside each other go on below, as lines
// of a text do.
function place(nodes, room) {
  const widths = [];
  for (const node of nodes) {
    node.width = [...node.label].length * LETTER + 2 * PAD;
    widths[node.depth] = Math.max(widths[node.depth] || 0, node.width);
  }
  let rows = 0;
  const stand = (node) => {
    node.row = node.children.length ? rows : rows++;
    node.children.forEach(stand);
  };
  stand(nodes[0]);
  const lines = [[]];
  let right = 1;
  widths.forEach((width, depth) => {
    if (depth > 0 && right + width + 1 > room) {
      lines.push([]);
      right = STUB;
    }
    lines.at(-1).push({ depth, left: right });
    right += width + GAP;
  });
  let [top, widest] = [0, 0];
  lines.forEach((line, number) => {
    const lefts = new Map(line.map(({ depth, left }) => [depth, left]));
    const here = nodes.filter((node) => lefts.has(node.depth));
    const used = [...new Set(here.map((node) => node.row))].sort((one, other) => one - other);
    for (const node of here) {
      node.line = number;
      node.x = lefts.get(node.depth);
      node.y = top + used.indexOf(node.row) * ROW + ROW / 2;
      widest = Math.max(widest, node.x + node.width + (number < lines.length - 1 ? STUB : 1));
    }
    top += used.length * ROW + (number < lines.length - 1 ? LEADING : 0);
  });
  return { width: widest, height: top };
}

function edgeOf(above, node) {
  const [x0, y0, x1, y1] = [above.x + above.width, above.y, node.x, node.y];
  if (above.line !== node.line) return `M${x0} ${y0}h${STUB - 4}M${x1 - STUB + 4} ${y1}H${x1}`;
  if (y0 === y1) return `M${x0} ${y0}H${x1}`;
  const bend = Math.max(x0 + 4, x1 - GAP + 4);
  return `M${x0} ${y0}H${bend}C${bend + 11} ${y0} ${bend} ${y1} ${x1} ${y1}`;
}

function drawingOf(step, isEnd, room) {
  const nodes = nodesOf(step, isEnd);
  const { width, height } = place(nodes, room);
  const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": wordsOf(step) });
  const edges = svg("g", { class: "edges" });
  const shapes = svg("g", {});
  for (const node of nodes.slice(1)) {
    const edge = svg("path", { d: edgeOf(nodes[node.parent], node), class: node.kind });
    if (node.kind === "lost") edges.prepend(edge);
    else edges.append(edge);
  }
  for (const node of nodes) {
    const group = svg("g", { class: `node ${node.kind}`, transform: `translate(${node.x} ${node.y - HEIGHT / 2})` });
    group.append(svg("rect", { width: node.width, height: HEIGHT, rx: node.kind === "root" ? 4 : HEIGHT / 2 }));
    group.append(svg("text", { x: node.width / 2, y: HEIGHT / 2 + 4, "text-anchor": "middle" }, node.label));
    shapes.append(group);
  }
  drawing.append(edges, shapes);
  return drawing;
}

function wordsOf(step) {
  const num = step.tree.ids.length - 1;
  const checked = `${num} ${num === 1 ? "guess" : "guesses"} checked`;
  const right = step.guessed ? `, ${step.guessed} kept` : ", none kept";
  return `${checked}${right}, and one token of the model’s own.`;
}
