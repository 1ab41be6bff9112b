import { make } from "./dom.js";
import { drawBlock, markdownBlocks } from "./markdown.js";
/* A text that grows, as elements in which every token is a span with the class of its origin. Style sheets decide whether the
   colours are seen. Blocks that did not change stay as they are, so that a long answer grows as fast as a short one. */

const NOTHING = { text: "", pieces: [], offset: 0, run: null };

export class AnswerView {
  /** `onPoint(view, cycle, token)` gets the token under the pointer or focus; null for both if there is none. */
  constructor(box, isMarkdown, onPoint) {
    this.box = box;
    this.isMarkdown = isMarkdown;
    this.onPoint = onPoint;
    this.shown = NOTHING;
    this.blocks = []; // {raw, start, element}
    this.marked = null; // index of the cycle whose tokens stand out
    box.addEventListener("pointerover", (event) => this.point(event.target));
    box.addEventListener("focusin", (event) => this.point(event.target));
    box.addEventListener("pointerleave", () => onPoint(this, null, null));
    box.addEventListener("keydown", (event) => this.step(event));
  }

  /** Shows a text. `pieces` are its tokens ({start, origin, cycle, place}, see runs.js), whose text begins `offset` before. */
  show({ text, pieces, offset, run }) {
    if (run !== this.shown.run || offset !== this.shown.offset || !text.startsWith(this.shown.text)) this.clear();
    this.shown = { text, pieces, offset, run };
    const blocks = this.isMarkdown ? markdownBlocks(text) : text.split(/(?<=\n)/).map((raw) => ({ raw, token: null }));
    let start = 0;
    blocks.forEach((block, index) => {
      const old = this.blocks[index];
      if (old?.raw !== block.raw || old.start !== start) this.place(index, block, start);
      start += block.raw.length;
    });
    for (const block of this.blocks.splice(blocks.length)) block.element?.remove();
    this.mark(this.marked);
  }

  clear() {
    this.box.replaceChildren();
    this.blocks = [];
    this.shown = NOTHING;
  }

  /** Draws one block in place of what was there. */
  place(index, { raw, token }, start) {
    const places = Array.from({ length: raw.length }, (_, at) => start + at);
    const paint = (text, of) => this.paint(text, of);
    const element = token ? drawBlock(token, places, paint) : make("span");
    if (!token) element.append(...paint(raw, places));
    const old = this.blocks[index]?.element;
    if (old && element) old.replaceWith(element);
    else if (old) old.remove();
    else if (element) this.box.insertBefore(element, this.blocks.slice(index + 1).find((block) => block.element)?.element ?? null);
    this.blocks[index] = { raw, start, element };
  }

  /** The text in spans, one for each token that it is of. */
  paint(text, places) {
    const { pieces, offset } = this.shown;
    if (!pieces.length) return [text];
    const spans = [];
    let piece = lastBefore(pieces, places[0] + offset);
    let from = 0;
    for (let at = 1; at <= text.length; at += 1) {
      if (at < text.length && !(places[at] + offset >= pieces[piece + 1]?.start)) continue;
      spans.push(span(text.slice(from, at), pieces[piece]));
      from = at;
      while (at < text.length && places[at] + offset >= pieces[piece + 1]?.start) piece += 1;
    }
    return spans;
  }

  /** Tells of the token under the pointer or focus. */
  point(target) {
    const run = this.shown.run;
    const cycle = target.matches(".token") && run?.cycles[target.dataset.cycle];
    if (cycle) this.onPoint(this, cycle, cycle.tokens[target.dataset.place]);
  }

  /** The arrow keys go from token to token. */
  step(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const all = [...this.box.querySelectorAll(".token")];
    if (!step || !all.length || !(event.target === this.box || event.target.matches(".token"))) return;
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const at = all.indexOf(document.activeElement);
    all[at < 0 ? 0 : Math.min(Math.max(at + step, 0), all.length - 1)].focus();
  }

  /** The spans of a cycle's tokens. */
  spansOf(index) {
    return [...this.box.querySelectorAll(`[data-cycle="${index}"]`)];
  }

  /** Marks the tokens of one cycle, by its index, or none. */
  mark(index) {
    for (const marked of this.box.querySelectorAll(".marked")) marked.classList.remove("marked");
    this.marked = index;
    if (index !== null) for (const marked of this.spansOf(index)) marked.classList.add("marked");
  }

  /** Underlines the text from a character on: where the texts of a race part. */
  markDifference(index) {
    for (const part of this.box.querySelectorAll(".token")) {
      part.classList.toggle("differs", Number(part.dataset.start) + part.textContent.length > index);
    }
  }
}

/** Index of the last piece that begins at a place or before. */
function lastBefore(pieces, place) {
  let [low, high] = [0, pieces.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (pieces[middle].start <= place) low = middle;
    else high = middle - 1;
  }
  return low;
}

function span(text, piece) {
  const element = make("span", { className: `token ${piece.origin}`, text, tabindex: "-1" });
  element.dataset.start = piece.start;
  if (piece.cycle !== undefined) {
    element.dataset.cycle = piece.cycle;
    element.dataset.place = piece.place;
  }
  return element;
}
