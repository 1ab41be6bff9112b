"use strict";
/* The answer as text in which every token is coloured by where it came from. All text goes in as text, never as HTML. */

const SHOWN_TOKENS = 2000; // older ones of an answer become one piece of text: thousands of elements in a paragraph are slow
const FOLD_TOKENS = 500; // tokens folded at a time, at least

/** An element with a class, text and attributes. */
function make(tag, { className = "", text = "", ...attributes } = {}) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** A token as a single line shows it: spaces and line breaks made visible. */
function visible(text) {
  if (!text) return "◦"; // a part of a character, or a special token
  return text
    .replace(/ {3,}/g, (spaces) => `␣${spaces.length}`)
    .replace(/^ | $/g, "·")
    .replaceAll("\n", "↵")
    .replaceAll("\t", "⇥");
}

/** One output box. `onPoint(cycle, token)` gets the token under the pointer, or null. */
class Output {
  constructor(box, onPoint) {
    this.box = box;
    this.run = null;
    this.prompt = null; // the element of what was asked
    this.answer = null; // the element that the current answer grows in
    this.drawn = 0; // cycles of the run that are drawn
    this.spans = []; // [cycle index] -> its spans; none if they are folded
    this.folded = null; // the element of the tokens that are no longer shown one by one
    this.foldedCycles = 0;
    this.onPoint = onPoint;
    this.followsEnd = true;
    box.addEventListener("pointerover", (event) => this.point(event.target));
    box.addEventListener("focusin", (event) => this.point(event.target));
    box.addEventListener("pointerleave", () => onPoint(null, null));
    box.addEventListener("keydown", (event) => this.step(event));
    box.addEventListener("scroll", () => {
      this.followsEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 24;
    });
  }

  /** Forgets everything and shows a text in place of an answer. */
  reset(...nodes) {
    this.box.replaceChildren(...nodes);
    this.run = this.prompt = this.answer = null;
    this.spans = [];
    this.drawn = 0;
  }

  /** The answers so far stay as they are. */
  keepPast() {
    for (const answer of this.box.querySelectorAll(".answer")) answer.classList.add("past");
    this.mark(null);
  }

  /** Takes the last prompt and its answer away. */
  withdraw() {
    this.prompt?.remove();
    this.answer?.remove();
  }

  /** Begins an answer after the prompt; `label` names who speaks in a chat. */
  begin(run, prompt, isChat) {
    this.prompt = make(isChat ? "p" : "span", { className: isChat ? "said" : "given", text: prompt });
    this.answer = make(isChat ? "p" : "span", { className: "answer" });
    this.folded = make("span", { className: "folded" });
    this.answer.append(this.folded);
    this.box.append(this.prompt, this.answer);
    this.run = run;
    this.spans = [];
    this.drawn = this.foldedCycles = 0;
    this.followsEnd = true;
    this.scroll();
  }

  /** Draws the cycles that came since the last call. */
  update() {
    if (!this.run || this.drawn === this.run.cycles.length) return;
    const fresh = document.createDocumentFragment();
    for (; this.drawn < this.run.cycles.length; this.drawn += 1) {
      const spans = this.run.cycles[this.drawn].tokens.map((token, place) => this.span(token, place));
      this.spans.push(spans);
      fresh.append(...spans);
    }
    this.answer.append(fresh);
    this.fold();
    this.scroll();
  }

  /** Makes one piece of text of the oldest tokens, when there are too many. */
  fold() {
    let excess = this.answer.childElementCount - 1 - SHOWN_TOKENS;
    if (excess < FOLD_TOKENS) return;
    let text = "";
    while (excess > 0) {
      const spans = this.spans[this.foldedCycles];
      this.spans[this.foldedCycles] = [];
      this.foldedCycles += 1;
      excess -= spans.length;
      for (const span of spans) {
        text += span.textContent;
        span.remove();
      }
    }
    this.folded.append(text);
  }

  span(token, place) {
    const span = make("span", { className: `token ${originOf(token)}`, text: token.text, tabindex: "-1" });
    if (token.text.includes("\n")) span.classList.add("break");
    if (!token.text) span.classList.add("silent"); // a part of a character, or a special token
    span.dataset.cycle = this.drawn;
    span.dataset.place = place;
    return span;
  }

  scroll() {
    if (this.followsEnd) this.box.scrollTop = this.box.scrollHeight;
  }

  /** Tells of the token under the pointer or focus. */
  point(target) {
    if (target === this.box || !target.matches(".token") || target.closest(".past")) return;
    const cycle = this.run?.cycles[target.dataset.cycle];
    if (cycle) this.onPoint(cycle, cycle.tokens[target.dataset.place]);
  }

  /** The arrow keys go from token to token. */
  step(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const all = this.spans.flat();
    if (!step || !all.length) return;
    event.preventDefault();
    const at = all.indexOf(document.activeElement);
    all[at < 0 ? 0 : Math.min(Math.max(at + step, 0), all.length - 1)].focus({ preventScroll: true });
    this.reveal(document.activeElement);
  }

  /** Marks the tokens of one cycle, or none. */
  mark(cycle) {
    for (const span of this.box.querySelectorAll(".marked")) span.classList.remove("marked");
    for (const span of (cycle && this.spans[cycle.index]) || []) span.classList.add("marked");
  }

  /** Scrolls the box, not the page, so that a cycle or token can be seen. */
  reveal(span) {
    const [box, line] = [this.box.getBoundingClientRect(), span.getBoundingClientRect()];
    if (line.top < box.top || line.bottom > box.bottom) this.box.scrollTop += line.top - box.top - box.height / 2;
  }

  /** Underlines the answer from a character on: where the texts of a race part. */
  markDifference(index) {
    let seen = this.folded.textContent.length;
    for (const span of this.spans.flat()) {
      seen += span.textContent.length;
      span.classList.toggle("differs", seen > index);
    }
  }
}
