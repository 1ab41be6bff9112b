"use strict";
/* What the visitor asks for: the fields of the form, and the request that they make. */

const EXAMPLES = {
  text: [
    ["A stack", "class Stack:\n    def __init__(self):"],
    ["A unit test", "import unittest\n\nclass ListTest(unittest.TestCase):\n    def test_append(self):"],
    ["Walk a folder", 'import os\n\ndef walk(top):\n    """Yield every file below a folder."""\n    for name in os.listdir(top):'],
    ["Read a file", 'def read_lines(filename):\n    """Return the lines of a file."""'],
  ],
  chat: [
    ["Explain", "Explain speculative decoding to a ten-year-old."],
    ["Write code", "Write a Python function that merges two sorted lists."],
    ["A haiku", "Write a haiku about a lucky guess."],
  ],
};
const BUILT_IN = "jaxspec-demo"; // writes only Python code, in a chat too
const FIELD_OF_PARAM = {
  prompt: "prompt",
  messages: "prompt",
  max_tokens: "max-tokens",
  temperature: "temperature",
  top_p: "top-p",
  seed: "seed",
  speculative: "tree",
};

function byId(id) {
  return document.getElementById(id);
}

/** The number in a field, or undefined if it is empty. The server has defaults, and checks the values. */
function numberIn(id) {
  const text = byId(id).value.trim();
  return text === "" ? undefined : Number(text);
}

function chosen(name) {
  return document.querySelector(`input[name="${name}"]:checked`).value;
}

/** The path and body of a request. `messages` are the chat so far, null when a text is completed. */
function requestFor(model, messages, speculates, seed) {
  const body = {
    model: model ?? undefined,
    ...(messages ? { messages } : { prompt: byId("prompt").value }),
    max_tokens: numberIn("max-tokens"),
    temperature: numberIn("temperature"),
    top_p: numberIn("top-p"),
    seed,
    stream: true,
    stream_options: { include_usage: true },
    speculative: { trace: true, ...speculativeFields(speculates) },
  };
  return { path: messages ? "/v1/chat/completions" : "/v1/completions", body };
}

function speculativeFields(speculates) {
  if (!speculates) return { enabled: false };
  const tree = byId("tree").value;
  if (!tree) return {};
  const [num_steps, eagle_topk, num_draft_tokens] = tree.split("/").map(Number);
  return { num_steps, eagle_topk, num_draft_tokens };
}

/** Fills the list of trees with the compiled ones; "0/..." is plain decoding, which the switch is for. */
function offerTrees(info) {
  const own = typeof info?.tree === "string" ? info.tree : "";
  const trees = (info?.speculative_trees ?? []).filter((tree) => /^[1-9]\d*\/\d+\/\d+$/.test(tree));
  byId("tree").replaceChildren(byId("tree").options[0]);
  byId("tree").options[0].textContent = own ? `${own} default` : "default";
  for (const tree of trees) {
    if (tree !== own) byId("tree").append(make("option", { text: tree, value: tree }));
  }
}

function examplesFor(model, mode) {
  return EXAMPLES[model === BUILT_IN ? "text" : mode];
}

/** The buttons that fill in an example. The first one is filled in already, unless something is written there. */
function offerExamples(examples) {
  const written = byId("prompt").value;
  const isExample = Object.values(EXAMPLES)
    .flat()
    .some(([, example]) => example === written);
  if (!written || isExample) byId("prompt").value = examples[0][1];
  const buttons = examples.map(([name, prompt]) => {
    const button = make("button", { className: "chip", text: name, type: "button" });
    button.addEventListener("click", () => {
      byId("prompt").value = prompt;
      byId("prompt").focus();
    });
    return button;
  });
  byId("examples").replaceChildren(...buttons);
}

/** Points out the field that the server objects to. */
function blame(param) {
  const name = param?.split(".")[0];
  if (Object.hasOwn(FIELD_OF_PARAM, name)) byId(FIELD_OF_PARAM[name]).setAttribute("aria-invalid", "true");
}

function forgive() {
  for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
}
