import { ask, askAgain, canSend, focusBox, follower, openConversation, openSetting, removeConversation, stop } from "./chat.js";
import { inspect, onStripKey, onStripPointer, pointAt, startReplay } from "./cycles.js";
import { byId, copyFrom } from "./dom.js";
import { buildLegend } from "./figures.js";
import { closePanel, showSidebar, togglePanel, uncover, watchSizes } from "./panel.js";
import { noteOrder, race } from "./race.js";
import { readJson } from "./server.js";
import { chosen, MAX_TOKENS, offerTrees, rememberSettings } from "./settings.js";
import { drawSidebar, exportConversation } from "./sidebar.js";
import { state } from "./state.js";
import { conversations, idOf, keep, keepKey, keptKey } from "./store.js";
import { offerExamples, welcome } from "./welcome.js";
import { tellPrograms } from "./waiting.js";
/* Puts the parts together: what fields, keys and buttons do, and what happens first. */

const TRY_AGAIN = 3000; // milliseconds

/** Asks the server for its model and trees; any of these requests may fail. */
async function meet() {
  const key = byId("key").value;
  const { status, json } = await readJson("/v1/models", key);
  const card = json?.data?.[0];
  state.card = card ?? null;
  const name = card ? modelInWords(card) : status === 401 ? "an API key is needed" : "no answer from the server";
  byId("model").textContent = name;
  if (status === 401) openSetting("key");
  if (!card) return status === 401 || setTimeout(() => byId("key").value === key && meet(), TRY_AGAIN);
  const canChat = card.capabilities?.chat ?? true;
  byId("chat-mode").disabled = !canChat;
  setKind(canChat && welcome(card).kind === "chat" ? "chat" : "text");
  offerTrees((await readJson("/server_info", key)).json ?? { ...card.speculative, speculative_trees: card.speculative?.trees });
  tellPrograms(
    (text) => (byId("model").textContent = name + text),
    () => state.card !== card,
    key,
  );
}

function modelInWords(card) {
  return card.max_model_len ? `${card.id} · ${card.max_model_len} tokens` : card.id;
}

/** What new conversations are: chats, or texts to complete. An empty one on the screen becomes one, too. */
function setKind(kind) {
  state.kind = kind;
  document.querySelector(`input[name="mode"][value="${kind}"]`).checked = true;
  offerExamples(state.card, kind);
  if (!state.conversation.messages.length) openConversation();
  describeBox();
}

/** The box says what its keys do: a text to complete has lines of its own. */
function describeBox() {
  const isChat = state.conversation.kind === "chat";
  byId("message").placeholder = isChat ? "Ask anything" : "Begin a text, and the model goes on";
  byId("message").classList.toggle("code-like", !isChat);
  byId("new").textContent = isChat ? "New chat" : "New text";
  byId("system").disabled = !isChat;
  byId("max-tokens").placeholder = MAX_TOKENS[state.conversation.kind];
  byId("keys").textContent = isChat ? "Enter sends, Shift+Enter breaks the line" : "Ctrl+Enter runs, Enter breaks the line";
}

function open(conversation) {
  openConversation(conversation);
  describeBox();
  uncover();
  focusBox();
}

let takenKey = keptKey();

function takeKey() {
  if (byId("key").value === takenKey) return;
  takenKey = byId("key").value;
  keepKey(takenKey);
  meet();
}

function send() {
  const text = byId("message").value;
  if (!text.trim() || !canSend()) return;
  byId("message").value = "";
  fitBox();
  ask(text);
}

/** The box is as high as its text, up to a limit of its style. */
function fitBox() {
  byId("message").style.height = "auto";
  byId("message").style.height = `${byId("message").scrollHeight}px`;
}

/** In a chat Enter sends, and breaks the line with Shift; a text to complete is sent with Ctrl. */
function sendsByKey(event) {
  if (event.key !== "Enter" || event.isComposing) return;
  const isChat = state.conversation.kind === "chat";
  if (isChat ? event.shiftKey : !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  event.target.form.requestSubmit();
}

/** Escape stops what is written, else closes what is open. */
function onEscape(event) {
  if (event.key !== "Escape") return;
  const edited = event.target.closest?.(".edited");
  if (edited) edited.querySelector("[data-action=cancel]").click();
  else if (state.stopper) stop();
  else if (!uncover()) closePanel();
}

/** A button within the messages. */
function onTranscriptClick(event) {
  const button = event.target.closest("[data-action]");
  if (!button) return;
  const index = [...byId("transcript").children].indexOf(button.closest(".turn"));
  const turn = state.turns[index];
  const act = {
    "copy-code": () => copyFrom(button, button.closest(".code").querySelector("code").textContent),
    copy: () => copyFrom(button, turn.message.content),
    edit: () => state.stopper || turn.edit(),
    cancel: () => turn.stopEditing(),
    again: () => askAgain(),
    inspect: () => {
      inspect(state.runs.get(turn.message) ?? null, turn.view, turn.message.figures);
      if (byId("panel").hidden || byId("inside").hidden) togglePanel("inside");
    },
  };
  act[button.dataset.action]();
}

function onEdited(event) {
  event.preventDefault();
  const index = [...byId("transcript").children].indexOf(event.target.closest(".turn"));
  const text = event.target.querySelector("textarea").value;
  if (!text.trim() || !canSend()) return;
  ask(text, index);
  focusBox();
}

function onSidebarClick(event) {
  const button = event.target.closest("[data-action]");
  const id = button?.parentElement.dataset.id;
  const conversation = state.opened.get(id) ?? conversations().find((kept) => kept.id === id);
  if (!conversation) return;
  if (button.dataset.action === "open") return conversation === state.conversation ? uncover() : open(conversation);
  if (confirm("Delete this conversation?")) removeConversation(conversation);
}

/** Another tab has kept or removed something. */
function onOtherTab({ key }) {
  const changed = state.opened.get(idOf(key));
  if (changed && !(changed === state.conversation && state.stopper)) {
    const kept = conversations().find(({ id }) => id === changed.id);
    state.opened.delete(changed.id);
    if (kept && changed === state.conversation) openConversation(kept);
  }
  drawSidebar();
}

function listen() {
  const on = (id, type, act) => byId(id).addEventListener(type, act);
  on("composer", "submit", (event) => (event.preventDefault(), send()));
  on("message", "keydown", sendsByKey);
  on("message", "input", fitBox);
  on("stop", "click", stop);
  on("to-end", "click", () => follower.toEnd());
  on("transcript", "click", onTranscriptClick);
  on("transcript", "submit", onEdited);
  on("transcript", "keydown", (event) => event.target.matches("textarea") && sendsByKey(event));
  on("new", "click", () => open());
  on("conversations", "click", onSidebarClick);
  on("export", "click", exportConversation);
  on("sidebar-open", "click", () => showSidebar(byId("sidebar").hidden));
  on("shade", "click", uncover);
  for (const view of ["inside", "settings"]) on(`${view}-open`, "click", () => togglePanel(view));
  on("panel-close", "click", closePanel);
  on("race", "click", race);
  on("replay", "click", startReplay);
  on("strip", "keydown", onStripKey);
  on("strip", "pointermove", onStripPointer);
  on("strip", "pointerdown", onStripPointer);
  on("strip", "pointerleave", () => pointAt(state.inspected.view, null, null));
  on("key", "change", takeKey);
  on("key-form", "submit", (event) => (event.preventDefault(), takeKey()));
  for (const radio of document.querySelectorAll('input[name="order"]')) radio.addEventListener("change", noteOrder);
  for (const radio of document.querySelectorAll('input[name="mode"]')) {
    radio.addEventListener("change", () => (setKind(chosen("mode")), open()));
  }
  document.addEventListener("keydown", onEscape);
  addEventListener("storage", onOtherTab);
  addEventListener("pagehide", () => state.stopper && keep(state.conversation));
}

byId("key").value = takenKey;
buildLegend();
rememberSettings();
noteOrder();
listen();
watchSizes();
openConversation(conversations().find(({ id }) => `#${id}` === location.hash));
describeBox();
focusBox();
meet();
