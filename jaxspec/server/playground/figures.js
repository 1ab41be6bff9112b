"use strict";
/* Draws what an answer or a race has brought so far: text, figures, legend, timeline. */

const FRAME = 50; // milliseconds between two drawings of a running answer: the model may share this machine

/** Draws all that changed, once, a little later. */
function soon() {
  state.timer ??= setTimeout(() => {
    state.timer = null;
    drawAll();
    if (state.stopper && state.runs.length > 1) soon(); // the timeline moves without events too
  }, FRAME);
}

function drawAll() {
  outputs.forEach((output) => output.update());
  const run = state.runs[0] ?? null;
  if (run) showFigures(run);
  showLegend(run);
  if (state.runs.length > 1) showRace();
  followTree();
  redrawStrip();
}

function showFigures(run) {
  const figures = figuresOf(run);
  const write = (id, value, format) => (byId(id).textContent = value === null ? "–" : format(value));
  write("figure-speed", figures.perSecond, (speed) => speed.toFixed(speed < 100 ? 1 : 0));
  write("figure-accept", figures.acceptLength, (length) => length.toFixed(2));
  write("figure-share", figures.draftShare, (share) => `${Math.round(share * 100)}%`);
  write("figure-first", figures.firstTokenSeconds, inSeconds);
  write("figure-tokens", figures.tokens, String);
}

function showRace() {
  const [on, off] = state.runs;
  const write = (id, value, digits) => (byId(id).textContent = value ? value.toFixed(digits) : "–");
  write("verdict-on", on && figuresOf(on).perSecond, 0);
  write("verdict-off", off && figuresOf(off).perSecond, 0);
  write("verdict-accept", on && figuresOf(on).acceptLength, 2);
  const verdict = on && off && raceVerdict(on, off);
  write("verdict-ratio", verdict?.ratio, 2);
  if (verdict?.ratio) byId("verdict-ratio").textContent += "×";
  byId("verdict-same").textContent = verdict ? (verdict.same ? "✓ identical text" : "✗ they differ") : "–";
  byId("verdict").dataset.same = verdict ? String(verdict.same) : "";
  if (verdict && !verdict.same) outputs.forEach((output) => output.markDifference(verdict.differsAt));
  drawTimeline(byId("timeline"), state.runs, performance.now());
  const times = state.runs.map((run) => (run ? inSeconds(figuresOf(run).seconds) : "not begun"));
  byId("timeline").setAttribute("aria-label", `With speculation ${times[0]}, without ${times[1]}`);
}

/** The legend counts, too: one bar for every way that a token can come. */
function showLegend(run) {
  const most = Math.max(1, ...Object.values(run?.origins ?? {}));
  for (const item of byId("legend").children) {
    const count = run?.origins[item.dataset.origin] ?? 0;
    item.querySelector(".count").textContent = run ? count : "";
    item.querySelector(".bar").style.setProperty("--part", count / most);
    item.classList.toggle("none", Boolean(run) && !count);
  }
}

function buildLegend() {
  const drafts = Array.from({ length: DEEPEST }, (_, index) => [
    `d${index + 1}`,
    index + 1 < DEEPEST ? `depth ${index + 1}` : `depth ${DEEPEST}+`,
  ]);
  const items = [...drafts, ["bonus", "bonus"], ["plain", "plain"]].map(([origin, name]) => {
    const item = make("li");
    item.dataset.origin = origin;
    const head = make("span", { className: "entry" });
    head.append(make("i", { className: `swatch ${origin}` }), make("span", { text: name }), make("span", { className: "count" }));
    item.append(head, make("span", { className: `bar ${origin}` }));
    return item;
  });
  byId("legend").replaceChildren(...items);
}
