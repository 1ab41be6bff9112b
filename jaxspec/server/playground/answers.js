"use strict";
/* Asks for an answer, or for the two of a race, and collects them. */

const REASONS = { length: "max tokens reached", stop: "it came to its end", abort: "ended by the server", timeout: "out of time" };

const state = {
  model: null,
  runs: [], // of the current answer; a race has two, with speculation first
  stopper: null, // an AbortController while something runs
  messages: [], // of the chat so far
  shown: null, // {run, cycle} whose tree is drawn
  treeAt: 0, // when it was drawn
  stripFrom: 0, // the first cycle in the strip
  replay: null, // the timer of a replay
  timer: null, // of the next drawing
};
const outputs = [0, 1].map((lane) => new Output(byId(`output-${lane}`), (cycle, token) => pointAt(lane, cycle, token)));

/** Runs the prompt, or races it with itself: both sides get the same seed. */
async function ask(isRace) {
  if (state.stopper) return;
  const prompt = byId("prompt").value;
  const messages = chosen("mode") === "chat" ? [...state.messages, { role: "user", content: prompt }] : null;
  const seed = numberIn("seed") ?? (isRace ? Math.floor(Math.random() * 2 ** 31) : undefined);
  const sides = isRace ? [true, false] : [byId("speculate").checked];
  const requests = sides.map((speculates) => requestFor(state.model, messages, speculates, seed));
  const { signal } = begin(isRace, messages);
  try {
    if (isRace && chosen("order") === "together") {
      await Promise.all(requests.map((request, lane) => answerIn(lane, prompt, request, signal)));
    } else {
      for (const [lane, request] of requests.entries()) if (!signal.aborted) await answerIn(lane, prompt, request, signal);
    }
  } finally {
    end(messages);
  }
}

/** Clears the stage for a new answer. A chat that continues stays. */
function begin(isRace, messages) {
  stopReplay();
  forgive();
  state.stopper = new AbortController();
  state.runs = isRace ? [null, null] : [null];
  state.shown = null;
  state.treeAt = 0;
  showStage(isRace);
  outputs.forEach((output, lane) => {
    if (messages?.length > 1 && !lane) output.keepPast();
    else output.reset();
    byId(`failure-${lane}`).hidden = true;
    byId(`status-${lane}`).textContent = isRace && lane ? "waits for its turn" : "";
  });
  setBusy(true);
  byId("token-detail").textContent = "";
  showAnswer();
  return state.stopper;
}

/** On a narrow screen the answer is below the form: goes there. */
function showAnswer() {
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (byId("lanes").getBoundingClientRect().top < innerHeight * 0.8) return;
  byId("stage").scrollIntoView({ behavior: calm ? "auto" : "smooth" });
}

/** One side: sends the request, collects the events, and shows how it ended. */
async function answerIn(lane, prompt, request, signal) {
  const run = newRun(request.body.speculative.enabled !== false);
  state.runs[lane] = run;
  outputs[lane].begin(run, prompt, Boolean(request.body.messages));
  byId(`status-${lane}`).textContent = "reading the prompt…";
  soon();
  try {
    await streamAnswer(request.path, request.body, byId("key").value, signal, (event) => {
      const cycle = addEvent(run, event, performance.now());
      if (cycle?.index === 0) byId(`status-${lane}`).textContent = "writing…";
      soon();
    });
    run.state = "finished";
  } catch (error) {
    run.state = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) fail(lane, error);
  }
  run.endedAt = performance.now();
  byId(`status-${lane}`).textContent = endInWords(run);
  soon();
}

function endInWords(run) {
  if (run.state === "stopped") return "stopped";
  if (run.state === "failed") return "failed";
  const reason = REASONS[run.finishReason] ?? run.finishReason ?? "finished";
  return `${inSeconds(figuresOf(run).seconds)}, ${reason}`;
}

/** Shows a failure where the answer would be, and the field that caused it. */
function fail(lane, error) {
  const known = error instanceof ServerError;
  if (!known) console.error(error);
  byId(`failure-${lane}`).textContent = known ? error.message : "This page has a bug: see the browser's console.";
  byId(`failure-${lane}`).hidden = false;
  if (error.status === 401) byId("key-box").open = true;
  if (error.status === 400) blame(error.param);
  if (error.status === 400 && error.param === "messages" && error.message.includes("no chat template")) refuseChat();
}

function end(messages) {
  state.stopper = null;
  setBusy(false);
  drawAll();
  const [run, other] = state.runs;
  if (state.runs.length > 1 && !other) byId("status-1").textContent = "not run";
  if (messages && run?.text) {
    state.messages = [...messages, { role: "assistant", content: run.text }];
    byId("prompt").value = "";
    byId("forget").hidden = false;
  } else if (messages) {
    outputs[0].withdraw(); // an unanswered message is not part of the chat
  }
}

function setBusy(isBusy) {
  for (const id of ["run", "race", "forget"]) byId(id).disabled = isBusy;
  byId("stop").disabled = !isBusy;
  byId("replay").disabled = isBusy || !state.runs[0]?.cycles.length;
}

/** One box and the figures, or two boxes, the timeline and the verdict. */
function showStage(isRace) {
  for (const id of ["verdict", "lane-1", "timeline-box"]) byId(id).hidden = !isRace;
  byId("figures").hidden = isRace;
  byId("lanes").classList.toggle("two", isRace);
  byId("title-0").textContent = isRace ? "With speculation" : "Answer";
}
