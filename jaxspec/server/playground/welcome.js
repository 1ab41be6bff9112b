import { byId, make } from "./dom.js";
/* What an empty conversation shows: the model, and questions that fit it. */

const BUILT_IN = "jaxspec-demo"; // has a chat template, but writes only Python code
const EXAMPLES = {
  chat: [
    ["Ask for a fact", "What is the capital of France?"],
    ["Make a list", "Give me five tips for a good night's sleep, as a list."],
    ["Write code", "Write a Python function that reverses a string, and explain it."],
    ["Explain something", "Why is the sky blue? Explain it to a ten-year-old."],
  ],
  code: [
    ["A stack", "class Stack:\n    def __init__(self):"],
    ["A unit test", "import unittest\n\nclass ListTest(unittest.TestCase):\n    def test_append(self):"],
    ["Walk a folder", 'import os\n\ndef walk(top):\n    """Yield every file below a folder."""\n    for name in os.listdir(top):'],
    ["Read a file", 'def read_lines(filename):\n    """Return the lines of a file."""'],
  ],
  text: [
    ["A story", "Once upon a time, at the edge of a quiet village,"],
    ["A fact", "The capital of France is"],
    ["A list", "Five tips for a good night's sleep:\n\n1."],
    ["Code", "def reverse(text):\n"],
  ],
};

/** How a conversation with a model begins. */
export function welcome(card) {
  const isBuiltIn = card?.id === BUILT_IN;
  return { kind: isBuiltIn ? "text" : "chat", examples: isBuiltIn ? { chat: EXAMPLES.code, text: EXAMPLES.code } : EXAMPLES };
}

/** Fills the empty screen. The examples are buttons that fill the box. */
export function offerExamples(card, kind) {
  byId("welcome-title").textContent = kind === "chat" ? "What would you like to know?" : "Begin a text, and the model goes on";
  byId("welcome-note").textContent = noteOn(card, kind);
  const buttons = welcome(card).examples[kind].map(([name, prompt]) => {
    const button = make("button", { className: "example", type: "button" });
    button.append(make("strong", { text: name }), make("span", { text: prompt }));
    button.addEventListener("click", () => {
      byId("message").value = prompt;
      byId("message").dispatchEvent(new Event("input"));
      byId("message").focus();
    });
    return button;
  });
  byId("examples").replaceChildren(...buttons);
}

function noteOn(card, kind) {
  if (card?.id === BUILT_IN) return "The built-in model is tiny: whatever you write, its answer looks like Python, and no more.";
  if (kind === "text" && card?.capabilities?.chat === false) return "This model has no chat template: it completes text.";
  return "";
}
