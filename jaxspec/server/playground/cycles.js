import { drawStrip, stripCycle, stripStart } from "./charts.js";
import { byId, make, visible } from "./dom.js";
import { showFigures } from "./figures.js";
import { figuresOf, newRun, originInWords, originOf, SOURCE_NAMES } from "./runs.js";
import { state } from "./state.js";
import { drawTree, EXAMPLE_CYCLE, singleStep } from "./tree.js";
/* Which answer the panel is about, and which of its cycles: the tree, its place in the strip, its tokens in the text. */

const TREE_PAUSE = 700; // a fast answer has more cycles than one can see, so its tree changes at a calm pace
const SHOWN_CUTS = 12; // texts of drafts that a schema cut

/** The panel turns to an answer, by its run and its view. Of one that was kept, `figures` is all there is. */
export function inspect(run, view, figures = null) {
  state.inspected?.view?.mark(null);
  state.inspected = { run, view };
  state.shown = null;
  state.treeAt = state.stripFrom = 0;
  byId("token-detail").textContent = "";
  tellCut(null);
  byId("replay").disabled = !run;
  const isGone = !run && figures;
  byId("gone").hidden = !isGone;
  for (const id of ["tree-section", "strip-section"]) byId(id).hidden = Boolean(isGone);
  showFigures(run ? figuresOf(run) : figures, run?.origins, run ? Object.keys(run.proposed) : keptSources(view));
  if (run?.cycles.length) return showCycle(run.cycles.at(-1));
  byId("tree-caption").textContent = "an example";
  drawPanel();
}

/** The sources in an answer that was kept. */
function keptSources(view) {
  const origins = new Set((view?.shown.pieces ?? []).map((piece) => piece.origin));
  return [...origins].filter((origin) => origin in SOURCE_NAMES);
}

/** Draws what the answer of the panel has brought since. Hidden, it costs nothing: the model may share this machine. */
export function drawRunning() {
  const { run } = state.inspected;
  if (byId("panel").hidden || !run) return;
  showFigures(figuresOf(run), run.origins, Object.keys(run.proposed));
  followTree();
  redrawStrip();
}

/** Draws all of it, as when the panel opens. */
export function drawPanel() {
  drawRunning();
  drawShownTree(true);
  redrawStrip();
}

/** While an answer is written the tree follows it; afterwards it shows the last cycle until another one is pointed at. */
function followTree() {
  const last = state.inspected.run?.cycles.at(-1);
  if (!last || state.shown?.pointed) return;
  const now = performance.now();
  if (state.stopper && now - state.treeAt < TREE_PAUSE) return;
  if (state.shown?.cycle !== last) showCycle(last, { calm: false });
}

/** Draws the tree of a cycle and marks its tokens, if the reader chose it. */
function showCycle(cycle, { pointed = false, calm = true } = {}) {
  state.shown = { cycle, pointed };
  state.treeAt = performance.now();
  state.inspected.view?.mark(pointed ? cycle.index : null);
  byId("tree-caption").textContent = cycleInWords(state.inspected.run, cycle);
  tellCut(cycle.tree);
  drawShownTree(calm);
  if (pointed) redrawStrip();
}

function drawShownTree(calm) {
  const run = state.inspected.run;
  const cycle = state.shown?.cycle ?? EXAMPLE_CYCLE;
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

/** Tells below a tree what the schema changed of it, with the texts of what it cut. */
function tellCut(tree) {
  const { pruned = [], forced = 0 } = tree ?? {};
  const count = pruned.length === 1 ? "1 draft" : `${pruned.length} drafts`;
  const parts = pruned.length ? [`${count} cut by the schema:`] : [];
  for (const text of pruned.slice(0, SHOWN_CUTS)) parts.push(" ", make("s", { text: visible(text) }));
  if (pruned.length > SHOWN_CUTS) parts.push(" …");
  if (forced) parts.push(parts.length ? `; ${forced} forced` : `${forced} forced by the schema`);
  byId("tree-cut").replaceChildren(...parts);
}

/** The reader points at a token of an answer, or at none. */
export function pointAt(view, cycle, token) {
  if (state.replay || byId("panel").hidden) return;
  if (!cycle) {
    if (state.shown) state.shown.pointed = false;
    return;
  }
  if (state.inspected.view !== view) inspect(view.shown.run, view);
  const id = token.id === undefined ? "" : `, token ${token.id}`;
  byId("token-detail").textContent = `${visible(token.text)}   ${originInWords(token)}${id}`;
  if (state.shown?.cycle !== cycle || !state.shown.pointed) showCycle(cycle, { pointed: true });
}

/** While an answer is written the strip shows its newest cycles, unless an older one is pointed at. */
function redrawStrip() {
  const run = state.inspected.run ?? newRun(true);
  const canvas = byId("strip");
  const follows = state.stopper && !state.shown?.pointed;
  const cycle = state.shown?.cycle ?? null;
  state.stripFrom = stripStart(canvas, run, follows ? null : cycle, state.stripFrom);
  drawStrip(canvas, run, follows ? null : cycle, state.stripFrom);
  const mean = figuresOf(run).acceptLength;
  byId("strip-caption").textContent = mean === null ? "" : `mean ${mean.toFixed(2)}, plain 1.00`;
  canvas.setAttribute("aria-valuemax", run.cycles.length);
  canvas.setAttribute("aria-valuemin", run.cycles.length ? 1 : 0);
  canvas.setAttribute("aria-valuenow", cycle ? cycle.index + 1 : 0);
  canvas.setAttribute("aria-valuetext", cycle ? cycleInWords(run, cycle) : "no pass yet");
}

/** Selects a cycle by its number; its tokens are scrolled to. */
export function selectCycle(index, calm = true) {
  const { run, view } = state.inspected;
  const cycle = run?.cycles[Math.min(Math.max(index, 0), run.cycles.length - 1)];
  if (!cycle) return;
  byId("token-detail").textContent = "";
  showCycle(cycle, { pointed: true, calm });
  view?.spansOf(cycle.index)[0]?.scrollIntoView({ block: "nearest" });
}

export function startReplay() {
  if (state.replay) return stopReplay();
  const { cycles } = state.inspected.run;
  let next = state.shown?.cycle.index + 1 < cycles.length ? state.shown.cycle.index : 0;
  const step = () => {
    if (next >= cycles.length) return stopReplay();
    selectCycle(next, false);
    next += 1;
  };
  byId("replay").textContent = "Stop replay";
  state.replay = setInterval(step, 1100);
  step();
}

export function stopReplay() {
  clearInterval(state.replay);
  state.replay = null;
  byId("replay").textContent = "Replay slowly";
}

export function onStripKey(event) {
  const { run } = state.inspected;
  if (!run) return;
  const at = state.shown?.cycle.index ?? 0;
  const [back, on] = [at - 1, at + 1];
  const to = { ArrowLeft: back, ArrowDown: back, ArrowRight: on, ArrowUp: on, Home: 0, End: run.cycles.length }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  stopReplay();
  selectCycle(to);
}

export function onStripPointer(event) {
  const { run } = state.inspected;
  if (!run || state.replay) return;
  const cycle = stripCycle(run, state.stripFrom, event.clientX - byId("strip").getBoundingClientRect().left);
  if (cycle && cycle !== state.shown?.cycle) selectCycle(cycle.index);
}
