import { byId, draw, inSeconds, make, markOf } from "./dom.js";
import { DEEPEST, SOURCE_NAMES } from "./runs.js";
/* The figures of an answer in the panel, and where its tokens came from. */

const BY_DEPTH = "A draft is a guess that the model accepted, by its depth in the tree;";
const BY_SOURCE = "A draft is a guess that the model accepted, by who made it, with the tree’s mark and the text’s line;";
const THE_REST = "the bonus is the model’s own next token, in the same pass; a plain token took a pass of its own.";

/** Shows figures as runs.js figuresOf gives them, null for none; `origins` counts the tokens by where they came from, `sources`
    are those that proposed drafts, if there are several. */
export function showFigures(figures, origins, sources = []) {
  const write = (id, value, format) => (byId(id).textContent = (value ?? null) === null ? "–" : format(value));
  write("figure-accept", figures?.acceptLength, (length) => length.toFixed(2));
  write("figure-speed", figures?.perSecond, (speed) => speed.toFixed(speed < 100 ? 1 : 0));
  write("figure-share", figures?.draftShare, (share) => `${Math.round(share * 100)}%`);
  write("figure-first", figures?.firstTokenSeconds, inSeconds);
  write("figure-tokens", figures?.tokens, String);
  byId("explained").textContent = figures?.passes ? passesInWords(figures) : "";
  showLegend(origins, sources);
}

/** What the tokens per pass mean. */
export function passesInWords({ passes, passTokens, draftShare }) {
  const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
  const times = `The model ran ${count(passes, "time")} for ${count(passTokens, "token")}`;
  return draftShare ? `${times}, instead of ${count(passTokens, "time")}.` : `${times}: no drafts.`;
}

/** The legend counts, too: one bar for every way that a token can come. */
function showLegend(origins, sources) {
  const most = Math.max(1, ...Object.values(origins ?? {}));
  for (const item of byId("legend").children) {
    const { origin, kind } = item.dataset;
    const count = origins?.[origin] ?? 0;
    item.hidden = kind === "source" ? !sources.includes(origin) : kind === "depth" && sources.length > 0;
    item.querySelector(".count").textContent = origins ? count : "";
    item.querySelector(".bar").style.setProperty("--part", count / most);
    item.classList.toggle("none", Boolean(origins) && !count);
  }
  byId("legend-note").textContent = `${sources.length ? BY_SOURCE : BY_DEPTH} ${THE_REST}`;
}

export function buildLegend() {
  const drafts = Array.from({ length: DEEPEST }, (_, index) => [
    "depth",
    `d${index + 1}`,
    index + 1 < DEEPEST ? `depth ${index + 1}` : `depth ${DEEPEST}+`,
  ]);
  const sources = Object.entries(SOURCE_NAMES).map(([origin, name]) => ["source", origin, name]);
  const rest = ["bonus", "plain"].map((origin) => ["rest", origin, origin]);
  const items = [...drafts, ...sources, ...rest].map(([kind, origin, name]) => {
    const item = make("li");
    Object.assign(item.dataset, { kind, origin });
    const head = make("span", { className: "entry" });
    const swatch = kind === "source" ? markedSwatch(origin) : make("i", { className: `swatch ${origin}` });
    head.append(swatch, make("span", { className: `name ${origin}`, text: name }), make("span", { className: "count" }));
    item.append(head, make("span", { className: `bar ${origin}` }));
    return item;
  });
  byId("legend").replaceChildren(...items);
}

/** A source's colour with its mark, as the tree has them. */
function markedSwatch(origin) {
  const svg = draw("svg", { class: `marked-swatch ${origin}`, width: 16, height: 16, viewBox: "0 0 16 16", "aria-hidden": "true" });
  svg.append(draw("rect", { width: 16, height: 16, rx: 3.5 }), draw("path", { d: markOf(origin, 8, 8), class: "mark" }));
  return svg;
}
