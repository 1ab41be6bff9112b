import { byId, inSeconds, make } from "./dom.js";
import { DEEPEST } from "./runs.js";
/* The figures of an answer in the panel, and where its tokens came from. */

/** Shows figures as runs.js figuresOf gives them, null for none; `origins` counts the tokens by where they came from. */
export function showFigures(figures, origins) {
  const write = (id, value, format) => (byId(id).textContent = (value ?? null) === null ? "–" : format(value));
  write("figure-accept", figures?.acceptLength, (length) => length.toFixed(2));
  write("figure-speed", figures?.perSecond, (speed) => speed.toFixed(speed < 100 ? 1 : 0));
  write("figure-share", figures?.draftShare, (share) => `${Math.round(share * 100)}%`);
  write("figure-first", figures?.firstTokenSeconds, inSeconds);
  write("figure-tokens", figures?.tokens, String);
  byId("explained").textContent = figures?.passes ? passesInWords(figures) : "";
  showLegend(origins);
}

/** What the tokens per pass mean. */
export function passesInWords({ passes, passTokens, draftShare }) {
  const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
  const times = `The model ran ${count(passes, "time")} for ${count(passTokens, "token")}`;
  return draftShare ? `${times}, instead of ${count(passTokens, "time")}.` : `${times}: no drafts.`;
}

/** The legend counts, too: one bar for every way that a token can come. */
function showLegend(origins) {
  const most = Math.max(1, ...Object.values(origins ?? {}));
  for (const item of byId("legend").children) {
    const count = origins?.[item.dataset.origin] ?? 0;
    item.querySelector(".count").textContent = origins ? count : "";
    item.querySelector(".bar").style.setProperty("--part", count / most);
    item.classList.toggle("none", Boolean(origins) && !count);
  }
}

export function buildLegend() {
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
