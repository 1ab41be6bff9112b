import { byId, make } from "./dom.js";
import { keepSettings, readSettings } from "./store.js";
/* The fields of the settings, which this browser remembers, and the request that they make. */

const FIELDS = ["system", "schema", "max-tokens", "seed", "temperature", "top-p", "speculate", "coloured"]; // are remembered
const FIELD_OF_PARAM = {
  prompt: "message",
  messages: "message",
  max_tokens: "max-tokens",
  temperature: "temperature",
  top_p: "top-p",
  seed: "seed",
  speculative: "tree",
  response_format: "schema",
};
export const MAX_TOKENS = { chat: 1024, text: 160 }; // small models may never end, and texts have no end of their own

/** The number in a field, or undefined if it is empty. The server has defaults, the model's own, and checks the values. */
export function numberIn(id) {
  const text = (valueOf(byId(id)) ?? "").trim();
  return text === "" ? undefined : Number(text);
}

export function chosen(name) {
  return document.querySelector(`input[name="${name}"]:checked`).value;
}

/** The path and body of a request for what comes after these messages. */
export function requestFor(card, conversation, messages, speculates, seed) {
  const isChat = conversation.kind === "chat";
  const most = Math.min(MAX_TOKENS[conversation.kind], Math.floor((card?.max_model_len ?? Infinity) / 2));
  const body = {
    model: card?.id,
    ...(isChat ? { messages: chatMessages(messages) } : { prompt: messages.at(-1).content }),
    max_tokens: numberIn("max-tokens") ?? most,
    temperature: numberIn("temperature"),
    top_p: numberIn("top-p"),
    seed,
    response_format: responseFormat(),
    stream: true,
    stream_options: { include_usage: true },
    speculative: { trace: true, ...speculativeFields(speculates) },
  };
  return { path: isChat ? "/v1/chat/completions" : "/v1/completions", body };
}

/** The system prompt and the messages. A question that got no answer is no part of them, but for the last. */
function chatMessages(messages) {
  const system = byId("system").value.trim();
  const said = messages.filter((message, index) => {
    if (message.role === "assistant") return message.content !== "";
    return index === messages.length - 1 || messages[index + 1].content !== "";
  });
  const fields = said.map(({ role, content }) => ({ role, content }));
  return system ? [{ role: "system", content: system }, ...fields] : fields;
}

/** Why the schema can't be sent; "" if it can, or if there is none. Which schemas can be enforced, the server knows. */
export function schemaFault() {
  const text = byId("schema").value.trim();
  if (!text) return "";
  try {
    JSON.parse(text);
    return text.startsWith("{") ? "" : "A schema is a JSON object: {…}";
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
}

/** The same in chats and completions. */
function responseFormat() {
  const text = byId("schema").value.trim();
  return text ? { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(text) } } : undefined;
}

function speculativeFields(speculates) {
  if (!speculates) return { enabled: false };
  const tree = byId("tree").value;
  if (!tree) return {};
  const [num_steps, eagle_topk, num_draft_tokens, head_steps] = tree.split("/").map(Number);
  return { num_steps, eagle_topk, num_draft_tokens, head_steps }; // JSON leaves out what is undefined
}

/** Fills the list of trees with the compiled ones; "0/..." is plain decoding, which the switch is for. */
export function offerTrees(info) {
  const own = typeof info?.tree === "string" ? info.tree : "";
  const trees = (info?.speculative_trees ?? []).filter((tree) => /^[1-9]\d*(\/\d+){2,3}$/.test(tree));
  byId("tree").replaceChildren(byId("tree").options[0]);
  byId("tree").options[0].textContent = own ? `${own} default` : "default";
  for (const tree of trees) {
    if (tree !== own) byId("tree").append(make("option", { text: tree, value: tree }));
  }
}

/** Points out the field that the server objects to. */
export function blame(param) {
  const name = param?.split(".")[0];
  if (Object.hasOwn(FIELD_OF_PARAM, name)) byId(FIELD_OF_PARAM[name]).setAttribute("aria-invalid", "true");
}

export function forgive() {
  for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
}

/** Fills the fields with what was set before, and remembers what is set from now on. */
export function rememberSettings() {
  const values = readSettings();
  for (const id of FIELDS) {
    const field = byId(id);
    if (field.type === "checkbox") field.checked = values[id] ?? field.checked;
    else field.value = values[id] ?? field.value;
    if (field.type === "range") mayBeUnset(field, id in values);
    field.addEventListener("input", () => {
      field.dataset.isSet = "yes";
      changed();
    });
  }
  apply();
}

/** A slider always has a value. So it says nothing until it is moved, and again after a double click, or the key Delete. */
function mayBeUnset(slider, isSet) {
  const unset = () => {
    delete slider.dataset.isSet;
    changed();
  };
  if (isSet) slider.dataset.isSet = "yes";
  slider.title = "A double click, or Delete: the model’s default";
  slider.addEventListener("dblclick", unset);
  slider.addEventListener("keydown", (event) => event.key === "Delete" && unset());
}

function changed() {
  apply();
  keepSettings(Object.fromEntries(FIELDS.map((name) => [name, valueOf(byId(name))])));
}

function valueOf(field) {
  if (field.type === "range") return field.dataset.isSet ? field.value : undefined;
  return field.type === "checkbox" ? field.checked : field.value;
}

/** What fields show of themselves elsewhere. */
function apply() {
  for (const slider of document.querySelectorAll('input[type="range"]')) {
    slider.labels[0].querySelector("output").textContent = valueOf(slider) ?? "default";
  }
  byId("tree").disabled = !byId("speculate").checked;
  const fault = schemaFault();
  byId("schema-fault").textContent = fault;
  if (fault) byId("schema").setAttribute("aria-invalid", "true");
  else byId("schema").removeAttribute("aria-invalid");
  document.body.classList.toggle("coloured", byId("coloured").checked);
}
