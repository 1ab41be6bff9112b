import { drawPanel } from "./cycles.js";
import { byId } from "./dom.js";
import { drawRace } from "./race.js";
/* What opens beside the conversation: on the right how an answer was made, or the settings; on the left the list of conversations.
   On a narrow screen each lies over it, and the rest of the page can't be reached meanwhile. */

const VIEWS = ["inside", "settings"];
const isNarrow = matchMedia("(max-width: 900px)");
const LEAVES_CHAT = matchMedia("(min-width: 1200px)"); // room for both sides and a conversation

/** Opens the panel at one of its views, or closes it if that is the one to be seen. */
export function togglePanel(view) {
  if (!byId("panel").hidden && byId(view).hidden === false) return closePanel();
  byId("panel").hidden = false;
  for (const name of VIEWS) {
    byId(name).hidden = name !== view;
    byId(`${name}-open`).setAttribute("aria-expanded", name === view);
  }
  if (!LEAVES_CHAT.matches) showSidebar(false);
  cover();
  byId(view).querySelector("h2").focus({ preventScroll: true });
  if (view === "inside") redraw();
}

export function closePanel() {
  if (byId("panel").hidden) return;
  const open = VIEWS.find((name) => !byId(name).hidden);
  byId("panel").hidden = true;
  for (const name of VIEWS) byId(`${name}-open`).setAttribute("aria-expanded", "false");
  cover();
  byId(`${open}-open`).focus();
}

export function showSidebar(isShown) {
  byId("sidebar").hidden = !isShown;
  byId("sidebar-open").setAttribute("aria-expanded", isShown);
  cover();
}

/** Closes what lies over the conversation. True if something did. */
export function uncover() {
  if (!isNarrow.matches || (byId("panel").hidden && byId("sidebar").hidden)) return false;
  closePanel();
  showSidebar(false);
  return true;
}

function cover() {
  const isCovered = isNarrow.matches && !(byId("panel").hidden && byId("sidebar").hidden);
  byId("chat").inert = isCovered;
  byId("shade").hidden = !isCovered;
}

function redraw() {
  if (byId("panel").hidden || byId("inside").hidden) return;
  drawPanel();
  drawRace();
}

/** Drawings depend on the size of their boxes and on the colour scheme. */
export function watchSizes() {
  showSidebar(!isNarrow.matches);
  new ResizeObserver(redraw).observe(byId("tree-view"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  isNarrow.addEventListener("change", () => {
    showSidebar(!isNarrow.matches);
    cover();
  });
}
