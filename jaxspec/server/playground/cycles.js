"use strict";
/* Which cycle is shown: its tree, its place in the strip, its tokens in the answer. */

const TREE_PAUSE = 700; // a fast answer has more cycles than one can see, so its tree changes at a calm pace

/** While an answer runs the tree follows it; afterwards it shows the last cycle until another one is pointed at. */
function followTree() {
  const run = state.runs[0];
  const last = run?.cycles.at(-1);
  if (!last || state.shown?.pointed) return;
  const now = performance.now();
  if (state.stopper && now - state.treeAt < TREE_PAUSE) return;
  if (state.shown?.cycle !== last) showCycle(run, last);
}

/** Draws the tree of a cycle and marks its tokens. */
function showCycle(run, cycle, { pointed = false, calm = false } = {}) {
  state.shown = { run, cycle, pointed, calm };
  state.treeAt = performance.now();
  outputs.forEach((output) => output.mark(output.run === run && (pointed || !state.stopper) ? cycle : null));
  byId("tree-caption").textContent = cycleInWords(run, cycle);
  drawShownTree(calm);
  if (pointed) redrawStrip();
}

function drawShownTree(calm) {
  const { run, cycle } = state.shown ?? { run: null, cycle: EXAMPLE_CYCLE };
  const before = run?.cycles[cycle.index - 1]?.tokens.at(-1)?.text ?? "the prompt";
  const tree = cycle.tree ?? (isPlain(cycle) ? singleStep(before) : null);
  const label = `${byId("tree-caption").textContent}: ${cycle.tokens.map((token) => token.text).join("")}`;
  if (tree) drawTree(byId("tree-view"), tree, cycle.tokens, label, calm);
  else byId("tree-view").replaceChildren(make("p", { className: "note", text: "This tree is no longer kept." }));
}

function isPlain(cycle) {
  return originOf(cycle.tokens[0]) === "plain";
}

function cycleInWords(run, cycle) {
  const place = `Pass ${cycle.index + 1} of ${run.cycles.length}`;
  if (!cycle.verified) return `${place}: the prompt is read, one token`;
  const count = cycle.tokens.length === 1 ? "one token" : `${cycle.tokens.length} tokens`;
  if (!cycle.tree) return `${place}: ${isPlain(cycle) ? "plain decoding, " : ""}${count}`;
  const drafts = `${cycle.tree.accepted.length - 1} of ${cycle.tree.tokens.length - 1} drafts accepted`;
  const isCut = cycle.tokens.length < cycle.tree.accepted.length; // by a stop, or by max tokens
  return `${place}: ${drafts}, ${isCut ? `cut to ${count}` : count}`;
}

/** The reader points at a token of an answer, or at none. */
function pointAt(lane, cycle, token) {
  if (state.replay) return;
  if (!cycle) {
    if (state.shown) state.shown.pointed = false;
    return;
  }
  const id = token.id === undefined ? "" : `, token ${token.id}`;
  byId("token-detail").textContent = `${visible(token.text)}   ${originInWords(token)}${id}`;
  const isNew = state.shown?.cycle !== cycle;
  if (isNew || !state.shown.pointed) showCycle(state.runs[lane], cycle, { pointed: true, calm: true });
}

/** While an answer runs the strip shows its newest cycles, unless an older one is pointed at. */
function redrawStrip() {
  const run = state.runs[0] ?? newRun(true);
  const canvas = byId("strip");
  const follows = state.stopper && !state.shown?.pointed;
  const cycle = state.shown?.run === run ? state.shown.cycle : null;
  state.stripFrom = stripStart(canvas, run, follows ? null : cycle, state.stripFrom);
  drawStrip(canvas, run, follows ? null : cycle, state.stripFrom);
  const mean = figuresOf(run).acceptLength;
  byId("strip-caption").textContent = mean === null ? "" : `mean ${mean.toFixed(2)}, plain 1.00`;
  canvas.setAttribute("aria-valuemax", run.cycles.length);
  canvas.setAttribute("aria-valuemin", run.cycles.length ? 1 : 0);
  canvas.setAttribute("aria-valuenow", cycle ? cycle.index + 1 : 0);
  canvas.setAttribute("aria-valuetext", cycle ? cycleInWords(run, cycle) : "no pass yet");
}

/** Selects a cycle of the first answer, by its number; its tokens are scrolled to. */
function selectCycle(index, calm = true) {
  const run = state.runs[0];
  const cycle = run?.cycles[Math.min(Math.max(index, 0), run.cycles.length - 1)];
  if (!cycle) return;
  showCycle(run, cycle, { pointed: true, calm });
  const [span] = outputs[0].spans[cycle.index] ?? [];
  if (span) outputs[0].reveal(span);
}

function startReplay() {
  if (state.replay) return stopReplay();
  let next = state.shown?.cycle.index + 1 < state.runs[0].cycles.length ? state.shown.cycle.index : 0;
  const step = () => {
    if (next >= state.runs[0].cycles.length) return stopReplay();
    selectCycle(next, false);
    next += 1;
  };
  byId("replay").textContent = "Stop replay";
  state.replay = setInterval(step, 1100);
  step();
}

function stopReplay() {
  clearInterval(state.replay);
  state.replay = null;
  byId("replay").textContent = "Replay slowly";
}
