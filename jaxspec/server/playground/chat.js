import { byId } from "./dom.js";
import { drawRunning, inspect, pointAt, stopReplay } from "./cycles.js";
import { addEvent, answerOf, coloursOf, figuresOf, newRun } from "./runs.js";
import { ServerError, streamAnswer } from "./server.js";
import { blame, forgive, numberIn, requestFor, schemaFault } from "./settings.js";
import { drawSidebar } from "./sidebar.js";
import { FRAME, state } from "./state.js";
import { forget, keep, newConversation } from "./store.js";
import { Answer, Follower, Question } from "./transcript.js";
import { tellWaiting } from "./waiting.js";
/* The conversation on the screen: what is asked, the answer as it comes, and how it ends. */

export const follower = new Follower(byId("scroll"));

/** Shows a conversation, or an empty one. */
export function openConversation(conversation = newConversation(state.kind)) {
  stop();
  state.conversation = conversation;
  state.opened.set(conversation.id, conversation);
  state.race = [];
  byId("race-result").hidden = true;
  for (const message of conversation.messages) if (message.role === "assistant") message.end ??= "stopped"; // by a crash
  state.turns = conversation.messages.map(turnOf);
  byId("transcript").replaceChildren(...state.turns.map((turn) => turn.element));
  settleTurns();
  const last = conversation.messages.at(-1);
  const run = last && state.runs.get(last);
  inspect(run ?? null, state.turns.at(-1)?.view ?? null, last?.figures);
  follower.toEnd();
  nameInAddress();
  drawSidebar();
}

/** A reload finds the conversation by the page's address. */
function nameInAddress() {
  const { id, messages } = state.conversation;
  history.replaceState(null, "", messages.length ? `#${id}` : location.pathname + location.search);
}

function turnOf(message) {
  const { kind } = state.conversation;
  return message.role === "user" ? new Question(message, kind) : new Answer(message, kind, pointAt);
}

/** The last answer has more to offer than those before. */
function settleTurns() {
  const isEmpty = !state.turns.length;
  byId("welcome").hidden = !isEmpty;
  byId("transcript").hidden = isEmpty;
  state.turns.forEach((turn, index) => turn.settle?.(index === state.turns.length - 1));
  byId("race").disabled = isEmpty || state.stopper !== null;
  byId("export").disabled = isEmpty;
}

function addMessage(message) {
  state.conversation.messages.push(message);
  const turn = turnOf(message);
  state.turns.push(turn);
  byId("transcript").append(turn.element);
  return turn;
}

/** Takes a message and all that follow away. */
function cutAt(index) {
  state.conversation.messages.length = index;
  for (const turn of state.turns.splice(index)) turn.element.remove();
}

/** Whether something can be sent now. Opens the settings if one of them can't be. */
export function canSend() {
  if (state.stopper) return false;
  if (!schemaFault()) return true;
  openSetting("schema");
  return false;
}

/** Asks, if it `canSend`; `index` replaces the question there and all that followed. */
export async function ask(text, index = state.conversation.messages.length) {
  cutAt(index);
  addMessage({ role: "user", content: text });
  await answer(addMessage({ role: "assistant", content: "" }));
}

/** Asks once more for the last answer. */
export async function askAgain() {
  const last = state.turns.at(-1);
  if (!last || !canSend()) return;
  await answer(last.message.role === "user" ? addMessage({ role: "assistant", content: "" }) : last);
}

export function stop() {
  stopReplay();
  state.stopper?.abort();
}

/** Has an answer written. What it held before stays until the first token is there. */
async function answer(turn) {
  const { conversation } = state;
  const { message } = turn;
  const speculates = byId("speculate").checked;
  const messages = conversation.messages.slice(0, -1);
  const request = requestFor(state.card, conversation, messages, speculates, numberIn("seed"));
  const { signal } = begin(turn);
  const run = newRun(speculates);
  const isWriting = () => run.state !== "waiting";
  tellWaiting((text) => turn.wait(text), isWriting, byId("key").value);
  let timer = null;
  let cost = 0; // milliseconds of the last drawing
  const draw = () => {
    const began = performance.now();
    timer = null;
    message.content = answerOf(run).text;
    message.thinking = run.thinking || undefined;
    turn.update(run);
    drawRunning();
    follower.update();
    cost = performance.now() - began;
  };
  try {
    await streamAnswer(request.path, request.body, byId("key").value, signal, (event) => {
      const cycle = addEvent(run, event, performance.now());
      if (cycle?.index === 0) startWriting(turn, run);
      timer ??= setTimeout(draw, Math.max(FRAME, cost * 6));
    });
    run.state = "finished";
    message.end = run.finishReason ?? "stop";
  } catch (error) {
    run.state = signal.aborted ? "stopped" : "failed";
    message.end = run.state;
    if (!signal.aborted) message.failure = failureInWords(error);
  }
  clearTimeout(timer);
  run.endedAt = performance.now();
  try {
    if (run.cycles.length || run.state === "finished") {
      draw();
      message.colours = coloursOf(answerOf(run));
      message.figures = figuresOf(run);
    }
  } finally {
    end(conversation, turn);
  }
}

function begin(turn) {
  forgive();
  stopReplay();
  Object.assign(turn.message, { end: undefined, failure: undefined });
  state.stopper = new AbortController();
  settleTurns();
  setBusy(true);
  turn.wait("Sending…");
  byId("spoken").textContent = "The model is answering.";
  keepConversation(state.conversation);
  follower.toEnd();
  return state.stopper;
}

/** The first token: the text of an earlier try makes room. */
function startWriting(turn, run) {
  state.runs.set(turn.message, run);
  Object.assign(turn.message, { colours: undefined, figures: undefined, thinking: undefined });
  turn.wait("");
  turn.element.classList.add("writing");
  if (state.turns.includes(turn)) inspect(run, turn.view);
}

function end(conversation, turn) {
  state.stopper = null;
  turn.element.classList.remove("writing");
  setBusy(false);
  keepConversation(conversation);
  if (state.conversation !== conversation) return;
  settleTurns();
  drawRunning();
  follower.update();
  byId("spoken").textContent = turn.message.failure ? "" : "The answer is complete.";
  if (document.activeElement === document.body) focusBox(); // the button that was pressed is gone
}

/** Where there is a mouse: a phone would open its keyboard over the answer. */
export function focusBox() {
  if (matchMedia("(hover: hover)").matches) byId("message").focus({ preventScroll: true });
}

function keepConversation(conversation) {
  conversation.changed = Date.now();
  byId("not-kept").hidden = keep(conversation);
  nameInAddress();
  drawSidebar();
}

/** A failure in words; points at the field that caused it. */
export function failureInWords(error) {
  if (!(error instanceof ServerError)) {
    console.error(error);
    return "This page has a bug: see the browser's console.";
  }
  if (error.status === 401) openSetting("key");
  if (error.status === 400) blame(error.param);
  return error.message;
}

/** Shows a field of the settings. */
export function openSetting(id) {
  if (byId("settings-open").getAttribute("aria-expanded") !== "true") byId("settings-open").click();
  byId(id).focus();
}

export function setBusy(isBusy) {
  byId("composer").classList.toggle("busy", isBusy);
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  byId("race").disabled = isBusy || !state.turns.length;
}

/** Forgets the conversation for good. */
export function removeConversation(conversation) {
  forget(conversation);
  if (conversation === state.conversation) openConversation();
  else drawSidebar();
}
