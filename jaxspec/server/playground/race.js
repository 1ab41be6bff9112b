import { AnswerView } from "./answer_view.js";
import { drawTimeline } from "./charts.js";
import { canSend, failureInWords, setBusy } from "./chat.js";
import { drawRunning, inspect, pointAt, stopReplay } from "./cycles.js";
import { byId, inSeconds } from "./dom.js";
import { addEvent, answerOf, figuresOf, newRun, raceVerdict } from "./runs.js";
import { streamAnswer } from "./server.js";
import { chosen, forgive, numberIn, requestFor } from "./settings.js";
import { FRAME, state } from "./state.js";
/* The last question once more, with drafts and without: the same text, and how long each took. The conversation stays as it is. */

const REASONS = { length: "max tokens reached", stop: "it came to its end", abort: "ended by the server", timeout: "out of time" };
const views = [0, 1].map((lane) => new AnswerView(byId(`output-${lane}`), false, pointAt));

/** Runs both sides with the same seed. */
export async function race() {
  const { conversation } = state;
  const last = conversation.messages.findLastIndex((message) => message.role === "user");
  if (last < 0 || !canSend()) return;
  const seed = numberIn("seed") ?? Math.floor(Math.random() * 2 ** 31);
  const messages = conversation.messages.slice(0, last + 1);
  const requests = [true, false].map((speculates) => requestFor(state.card, conversation, messages, speculates, seed));
  const { signal } = begin();
  const timer = setInterval(drawRace, 2 * FRAME);
  try {
    if (chosen("order") === "together") await Promise.all(requests.map((request, lane) => run(lane, request, signal)));
    else for (const [lane, request] of requests.entries()) if (!signal.aborted) await run(lane, request, signal);
  } finally {
    clearInterval(timer);
    state.stopper = null;
    setBusy(false);
    if (!state.race[1]) byId("status-1").textContent = "not run";
    drawRace();
  }
}

function begin() {
  stopReplay();
  forgive();
  state.stopper = new AbortController();
  state.race = [null, null];
  views.forEach((view, lane) => {
    view.clear();
    byId(`failure-${lane}`).hidden = true;
    byId(`status-${lane}`).textContent = lane ? "waits for its turn" : "";
  });
  byId("race-result").hidden = false;
  setBusy(true);
  return state.stopper;
}

/** One side: sends the request, collects the events, and says how it ended. */
async function run(lane, request, signal) {
  const run = newRun(request.body.speculative.enabled !== false);
  state.race[lane] = run;
  if (!lane) inspect(run, views[0]);
  byId(`status-${lane}`).textContent = "reading the prompt…";
  try {
    await streamAnswer(request.path, request.body, byId("key").value, signal, (event) => {
      const cycle = addEvent(run, event, performance.now());
      if (cycle?.index === 0) byId(`status-${lane}`).textContent = "writing…";
    });
    run.state = "finished";
  } catch (error) {
    run.state = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) byId(`failure-${lane}`).textContent = failureInWords(error);
    byId(`failure-${lane}`).hidden = signal.aborted;
  }
  run.endedAt = performance.now();
  byId(`status-${lane}`).textContent = endInWords(run);
}

function endInWords(run) {
  if (run.state !== "finished") return run.state;
  return `${inSeconds(figuresOf(run).seconds)}, ${REASONS[run.finishReason] ?? run.finishReason ?? "finished"}`;
}

/** Draws what both sides have brought so far. */
export function drawRace() {
  if (!state.race.length) return;
  const [on, off] = state.race;
  state.race.forEach((run, lane) => run && views[lane].show({ ...answerOf(run), text: run.text, offset: 0 }));
  const write = (id, value, digits) => (byId(id).textContent = value ? value.toFixed(digits) : "–");
  write("verdict-on", on && figuresOf(on).perSecond, 0);
  write("verdict-off", off && figuresOf(off).perSecond, 0);
  const verdict = on && off && raceVerdict(on, off);
  write("verdict-ratio", verdict?.ratio, 2);
  if (verdict?.ratio) byId("verdict-ratio").textContent += "×";
  byId("verdict-same").textContent = verdict ? (verdict.same ? "✓ identical text" : "✗ they differ") : "–";
  byId("verdict").dataset.same = verdict ? String(verdict.same) : "";
  if (verdict && !verdict.same) views.forEach((view) => view.markDifference(verdict.differsAt));
  drawTimeline(byId("timeline"), state.race, performance.now());
  const times = state.race.map((run) => (run ? inSeconds(figuresOf(run).seconds) : "not begun"));
  byId("timeline").setAttribute("aria-label", `With speculation ${times[0]}, without ${times[1]}`);
  drawRunning();
}

export function noteOrder() {
  const together = chosen("order") === "together";
  byId("order-note").textContent = together ? "Both share the machine: each is slower." : "Each has the machine to itself.";
}
