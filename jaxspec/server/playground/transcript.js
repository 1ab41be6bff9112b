import { AnswerView } from "./answer_view.js";
import { actionButton, byId, make } from "./dom.js";
import { passesInWords } from "./figures.js";
import { answerOf, piecesOf } from "./runs.js";
/* The messages of a conversation on the screen. */

/** A question: what the visitor wrote, and a button to change it. */
export class Question {
  constructor(message, kind) {
    this.message = message;
    this.element = make("li", { className: `turn question ${kind}` });
    this.element.append(make("h2", { className: "unseen", text: kind === "chat" ? "You" : "The beginning" }));
    this.bubble = make("div", { className: "bubble", text: message.content });
    const actions = make("div", { className: "actions" });
    actions.append(actionButton("edit", "Edit"), actionButton("copy", "Copy"));
    this.element.append(this.bubble, actions);
  }

  /** The bubble becomes a box to write in. */
  edit() {
    if (this.element.querySelector("textarea")) return;
    const form = make("form", { className: "edit" });
    const box = make("textarea", { "aria-label": "Your message", rows: "3" });
    box.value = this.message.content;
    const row = make("div", { className: "actions" });
    row.append(
      actionButton("cancel", "Cancel"),
      make("button", { className: "primary small", text: "Send again", type: "submit" }),
    );
    form.append(box, row);
    this.element.classList.add("edited");
    this.element.append(form);
    box.focus();
  }

  stopEditing() {
    this.element.querySelector("form")?.remove();
    this.element.classList.remove("edited");
    this.element.querySelector("[data-action=edit]").focus();
  }
}

/** An answer: its text, and below what became of it. */
export class Answer {
  constructor(message, kind, onPoint) {
    this.message = message;
    this.element = make("li", { className: "turn answer" });
    this.thinking = make("details", { className: "thinking" });
    this.thinking.append(make("summary", { text: "Thinking" }), make("div"));
    this.body = make("div", { className: kind === "chat" ? "body markdown" : "body raw", role: "group", "aria-label": "Answer" });
    this.waiting = make("p", { className: "waiting" });
    this.note = make("p", { className: "note" });
    this.failure = make("div", { className: "failure", role: "alert" });
    this.foot = make("footer");
    this.element.append(make("h2", { className: "unseen", text: "Answer" }));
    this.element.append(this.thinking, this.body, this.waiting, this.note, this.failure, this.foot);
    this.view = new AnswerView(this.body, kind === "chat", onPoint);
    this.update(null);
    this.settle();
  }

  /** Draws the text: the run's while there is one, else what was kept. */
  update(run) {
    const { content, colours, thinking } = this.message;
    this.view.show(run ? answerOf(run) : { text: content, pieces: piecesOf(colours), offset: 0, run: null });
    this.thinking.hidden = !thinking;
    if (thinking) this.thinking.lastChild.textContent = thinking;
  }

  wait(text) {
    this.waiting.textContent = text;
    this.waiting.hidden = !text;
  }

  /** Shows how it ended, and what can be done with it. */
  settle(isLast = true) {
    const { content, end, failure, figures } = this.message;
    this.wait("");
    this.note.textContent = noteOn(this.message);
    this.note.hidden = !this.note.textContent;
    this.failure.hidden = !failure;
    this.failure.replaceChildren();
    if (failure) {
      const retry = make("button", { className: "primary small", text: "Try again", type: "button" });
      retry.dataset.action = "again";
      this.failure.append(make("p", { text: failure }), retry);
      retry.hidden = !isLast;
    }
    const actions = make("div", { className: "actions" });
    if (content) actions.append(actionButton("copy", "Copy"));
    if (end && isLast && !failure) actions.append(actionButton("again", "Regenerate"));
    this.foot.replaceChildren(...(figures?.acceptLength ? figureLine(figures, isLast) : []), actions);
    this.foot.hidden = !end;
  }
}

/** The one figure that matters, which opens the panel, and what it means. */
function figureLine(figures, isLast) {
  const text = `${figures.acceptLength.toFixed(1)} tokens per pass`;
  const button = make("button", { className: "figure", text, type: "button", title: "Show how this answer was made" });
  button.dataset.action = "inspect";
  const explained = make("span", { className: "explained", text: isLast ? passesInWords(figures) : "" });
  return [button, explained];
}

/** Why an answer is empty, or ends where it does. */
function noteOn({ content, end }) {
  if (!end || end === "failed") return "";
  return (content.trim() ? ENDS[end] : (EMPTY[end] ?? "The answer is empty.")) ?? "";
}

const ENDS = {
  length: "Cut off at “max tokens”: the settings have the limit.",
  stopped: "Stopped.",
  abort: "Ended by the server.",
  timeout: "Out of time: ended by the server.",
};
const EMPTY = {
  stop: "An empty answer: the model’s first token was the one that ends an answer. Try other words, or a higher temperature.",
  length: "An empty answer: “max tokens” was reached before there was any text. The settings have the limit.",
  stopped: "Stopped before the first token.",
  abort: "An empty answer: the server ended the request.",
};

/** Follows the end of what is written, unless the reader has scrolled up. */
export class Follower {
  constructor(box) {
    this.box = box;
    this.follows = true;
    box.addEventListener("scroll", () => {
      this.follows = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
      byId("to-end").hidden = this.follows;
    });
  }

  toEnd() {
    this.follows = true;
    this.update();
  }

  update() {
    if (this.follows) this.box.scrollTop = this.box.scrollHeight;
  }
}
