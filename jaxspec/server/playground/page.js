"use strict";
/* Puts the parts together: what the fields, keys and buttons do, and what happens first. */

function changeMode() {
  const mode = chosen("mode");
  byId("prompt-label").textContent = mode === "chat" ? "Message" : "Prompt";
  offerExamples(examplesFor(state.model, mode));
  forgetChat();
}

/** Shows a note about the model above the prompt. */
function note(text) {
  byId("mode-note").textContent = text;
  byId("mode-note").hidden = false;
}

function forgetChat() {
  state.messages = [];
  byId("forget").hidden = true;
}

function refuseChat() {
  byId("chat-mode").disabled = true;
  document.querySelector('input[name="mode"][value="text"]').checked = true;
  note("This model has no chat template: it can only complete text.");
  changeMode();
}

function noteOrder() {
  const together = chosen("order") === "together";
  byId("order-note").textContent = together ? "Both share the machine: each is slower." : "Each has the machine to itself.";
}

/** Asks the server for its model and trees; any of these requests may fail. */
async function meet() {
  const key = byId("key").value;
  const models = await readJson("/v1/models", key);
  const card = models.json?.data?.[0];
  state.model = card?.id ?? null;
  byId("model").textContent = card
    ? modelInWords(card)
    : models.status === 401
      ? "an API key is needed"
      : "no answer from the server";
  if (models.status === 401) byId("key-box").open = true;
  if (!card) return;
  if (card.id === BUILT_IN) note("The built-in model is tiny: its output only looks like Python.");
  const [server, model] = await Promise.all([readJson("/server_info", key), readJson("/model_info", key)]);
  offerTrees({ ...model.json, ...server.json });
  showPrograms(server.json?.programs, byId("model").textContent, key);
  if (model.json?.has_chat_template === false) refuseChat();
}

/** While programs compile, the page says how many are there. */
async function showPrograms(programs, name, key) {
  while (programs && programs.ready < programs.total) {
    byId("model").textContent = `${name} · ${programs.ready} of ${programs.total} programs compiled`;
    await new Promise((resolve) => setTimeout(resolve, 5000));
    if (byId("key").value !== key) return;
    programs = (await readJson("/server_info", key)).json?.programs;
  }
  byId("model").textContent = name;
}

function modelInWords(card) {
  return card.max_model_len ? `${card.id} · ${card.max_model_len} tokens` : card.id;
}

/** The key is kept for this tab only. */
function takeKey() {
  if (byId("key").value === sessionStorage.getItem("jaxspec-key")) return;
  sessionStorage.setItem("jaxspec-key", byId("key").value);
  meet();
}

function stop() {
  stopReplay();
  state.stopper?.abort();
}

function onKey(event) {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    ask(false);
  } else if (event.key === "Escape") {
    stop();
  }
}

function onStripKey(event) {
  const run = state.runs[0];
  if (!run) return;
  const at = state.shown?.run === run ? state.shown.cycle.index : 0;
  const [back, on] = [at - 1, at + 1];
  const to = { ArrowLeft: back, ArrowDown: back, ArrowRight: on, ArrowUp: on, Home: 0, End: run.cycles.length }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  stopReplay();
  selectCycle(to);
}

function onStripPointer(event) {
  const run = state.runs[0];
  if (!run || state.replay) return;
  const cycle = stripCycle(run, state.stripFrom, event.clientX - byId("strip").getBoundingClientRect().left);
  if (cycle && cycle !== state.shown?.cycle) selectCycle(cycle.index);
}

function listen() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(false);
  });
  byId("race").addEventListener("click", () => ask(true));
  byId("stop").addEventListener("click", stop);
  byId("replay").addEventListener("click", startReplay);
  byId("forget").addEventListener("click", () => {
    forgetChat();
    outputs[0].reset();
  });
  document.addEventListener("keydown", onKey);
  byId("speculate").addEventListener("change", () => (byId("tree").disabled = !byId("speculate").checked));
  for (const radio of document.querySelectorAll('input[name="mode"]')) radio.addEventListener("change", changeMode);
  for (const radio of document.querySelectorAll('input[name="order"]')) radio.addEventListener("change", noteOrder);
  for (const slider of document.querySelectorAll('input[type="range"]')) {
    slider.addEventListener("input", () => (slider.labels[0].querySelector("output").textContent = slider.value));
  }
  byId("strip").addEventListener("keydown", onStripKey);
  byId("strip").addEventListener("pointermove", onStripPointer);
  byId("strip").addEventListener("pointerdown", onStripPointer);
  byId("strip").addEventListener("pointerleave", () => pointAt(0, null, null));
  byId("key").addEventListener("change", takeKey);
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    takeKey();
    byId("key-box").open = false;
  });
}

/** Drawings depend on the size of their boxes and on the colour scheme. */
function watchSizes() {
  const redraw = () => {
    drawShownTree(true);
    redrawStrip();
    if (state.runs.length > 1) showRace();
  };
  new ResizeObserver(redraw).observe(byId("tree-view"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

byId("key").value = sessionStorage.getItem("jaxspec-key") ?? "";
byId("tree-caption").textContent = "An example: 3 of 7 drafts accepted, 4 tokens";
buildLegend();
showLegend(null);
changeMode();
noteOrder();
listen();
watchSizes();
meet();
