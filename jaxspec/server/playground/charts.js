import { inSeconds } from "./dom.js";
import { figuresOf, originOf } from "./runs.js";
/* Two drawings on canvas: tokens per pass (the strip), and a race's time (the timeline). */

const STRIP = { column: 9, gap: 2, left: 22, bottom: 8, top: 8 };
const TIMELINE = { left: 74, right: 64, row: 22, gap: 8, axis: 16 };

/** A canvas made ready: its size in CSS pixels, a context in them, and the page's colours. */
function prepare(canvas) {
  const [width, height, scale] = [canvas.clientWidth, canvas.clientHeight, window.devicePixelRatio || 1];
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  context.font = `11px ${colour("mono")}`;
  context.textBaseline = "middle";
  return { width, height, context, colour };
}

/** How many cycles the strip has room for. */
function stripRoom(canvas) {
  return Math.max(Math.floor((canvas.clientWidth - STRIP.left) / STRIP.column), 1);
}

/** Index of the first cycle to show: of the newest ones, or as it was but for what it takes to see the selected one. */
export function stripStart(canvas, run, selected, before) {
  const room = stripRoom(canvas);
  const newest = Math.max(run.cycles.length - room, 0);
  if (!selected) return newest;
  return Math.min(Math.max(before, selected.index - room + 1, 0), selected.index, newest);
}

/** The cycle at a horizontal position in the strip, or null. */
export function stripCycle(run, start, x) {
  return (x >= STRIP.left && run.cycles[start + Math.floor((x - STRIP.left) / STRIP.column)]) || null;
}

/** One column per cycle, one cell per token, in the tokens' colours; a line at the mean. */
export function drawStrip(canvas, run, selected, start) {
  const { width, height, context, colour } = prepare(canvas);
  const shown = run.cycles.slice(start, start + stripRoom(canvas));
  const most = Math.max(4, run.longest);
  const base = height - STRIP.bottom;
  const unit = Math.min((base - STRIP.top) / most, 34);
  context.fillStyle = context.strokeStyle = colour("muted");
  context.textAlign = "right";
  const step = most > 9 ? 3 : 1;
  for (let count = 1; count <= most; count += step) context.fillText(`${count}`, STRIP.left - 8, base - unit * count);
  shown.forEach((cycle, place) => {
    const x = STRIP.left + place * STRIP.column;
    cycle.tokens.forEach((token, level) => {
      context.fillStyle = colour(`${originOf(token)}-fill`);
      context.beginPath();
      context.roundRect(x, base - unit * (level + 1) + 1, STRIP.column - STRIP.gap, unit - 1.5, 2);
      context.fill();
    });
    if (cycle === selected) {
      context.fillStyle = colour("text");
      context.fillRect(x, base + 3, STRIP.column - STRIP.gap, 3);
    }
  });
  const mean = figuresOf(run).acceptLength;
  if (mean !== null) drawMean(context, base - unit * mean, width, colour("text"));
}

function drawMean(context, y, width, colour) {
  context.strokeStyle = colour;
  context.setLineDash([2, 3]);
  context.beginPath();
  context.moveTo(STRIP.left, y);
  context.lineTo(width, y);
  context.stroke();
  context.setLineDash([]);
}

/** Both sides of a race over one axis of time, one block per cycle, in the colour of its deepest token. */
export function drawTimeline(canvas, runs, now) {
  const { width, height, context, colour } = prepare(canvas);
  const elapsed = runs.map((run) => (run ? (run.endedAt ?? now) - run.askedAt : 0));
  const scale = (width - TIMELINE.left - TIMELINE.right) / axisEnd(Math.max(...elapsed, 1));
  runs.forEach((run, index) => {
    const y = index * (TIMELINE.row + TIMELINE.gap);
    context.textAlign = "left";
    context.fillStyle = colour("muted");
    context.fillText(index ? "without" : "with", 0, y + TIMELINE.row / 2);
    context.fillStyle = colour("track");
    context.beginPath();
    context.roundRect(TIMELINE.left, y, width - TIMELINE.left - TIMELINE.right, TIMELINE.row, 4);
    context.fill();
    if (!run) return;
    drawBlocks(context, colour, run, y, scale);
    context.fillStyle = colour("text");
    context.fillText(inSeconds(elapsed[index] / 1000), TIMELINE.left + elapsed[index] * scale + 8, y + TIMELINE.row / 2);
  });
  drawAxis(context, colour, width, height, scale);
}

function drawBlocks(context, colour, run, y, scale) {
  let from = run.askedAt;
  for (const cycle of run.cycles) {
    const [x, wide] = [TIMELINE.left + (from - run.askedAt) * scale, (cycle.at - from) * scale];
    context.fillStyle = colour(blockColour(cycle));
    context.fillRect(x, y, Math.max(wide - (wide > 3 ? 0.75 : 0), 0.4), TIMELINE.row);
    from = cycle.at;
  }
}

/** A pass has the colour of its deepest accepted draft. */
function blockColour(cycle) {
  if (!cycle.verified) return "muted";
  const draft = cycle.tokens.findLast((token) => token.from === "draft");
  const origin = originOf(draft ?? cycle.tokens[0]);
  return origin === "plain" ? "wait" : `${origin}-fill`;
}

function drawAxis(context, colour, width, height, scale) {
  const end = (width - TIMELINE.left - TIMELINE.right) / scale;
  const y = height - TIMELINE.axis / 2;
  context.fillStyle = colour("muted");
  context.textAlign = "center";
  for (const part of [0, 0.25, 0.5, 0.75, 1])
    context.fillText(inSeconds((end * part) / 1000), TIMELINE.left + end * part * scale, y);
}

/** A round number of milliseconds at or above the time, so that the axis does not change all the time. */
function axisEnd(milliseconds) {
  const size = 10 ** Math.floor(Math.log10(milliseconds));
  return [1, 1.6, 2, 3, 4, 6, 8, 10].find((step) => step * size >= milliseconds) * size;
}
