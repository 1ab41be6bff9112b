/* What this browser keeps: the conversations, one entry each, so that two tabs don't undo each other's, and the settings. The
   server keeps nothing. A browser that keeps nothing either (a private window, a full disk) loses its conversations with the page. */

const CHAT = "jaxspec-chat-";
const SETTINGS = "jaxspec-settings";
const KEY = "jaxspec-key";

/** An empty conversation. `kind` is "chat", or "text" where every question is a text to complete. */
export function newConversation(kind) {
  const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
  return { id, kind, changed: Date.now(), messages: [] };
}

/** All that are kept, newest first. */
export function conversations() {
  const ids = allKeys().filter((key) => key.startsWith(CHAT));
  const all = ids.map((key) => read(key)).filter((value) => Array.isArray(value?.messages) && value.messages.length);
  return all.sort((a, b) => b.changed - a.changed);
}

/** The id of the conversation that the browser keeps under a key, if one is. */
export function idOf(key) {
  return key?.startsWith(CHAT) ? key.slice(CHAT.length) : undefined;
}

/** The server's key, which is kept for this tab only, if the browser does. */
export function keptKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export function keepKey(key) {
  try {
    sessionStorage.setItem(KEY, key);
  } catch {} // the browser keeps nothing for this page
}

/** Keeps a conversation as it is now, unless it is empty. False if the browser does not. */
export function keep(conversation) {
  return !conversation.messages.length || write(CHAT + conversation.id, conversation);
}

export function forget(conversation) {
  conversation.messages = []; // an answer that is still being written has nowhere to go
  localStorage.removeItem(CHAT + conversation.id);
}

export function readSettings() {
  return read(SETTINGS) ?? {};
}

export function keepSettings(values) {
  write(SETTINGS, values);
}

/** Its first question, cut to one line. */
export function titleOf(conversation) {
  const text = conversation.messages[0]?.content.trim().replace(/\s+/g, " ") ?? "";
  return text.length > 60 ? `${text.slice(0, 59)}…` : text || "Nothing yet";
}

/** The conversation as a file to read. */
export function inMarkdown(conversation) {
  const parts = conversation.messages.map(({ role, content }) => `## ${role === "user" ? "You" : "Answer"}\n\n${content}\n`);
  return `# ${titleOf(conversation)}\n\n${parts.join("\n")}`;
}

function allKeys() {
  try {
    return Object.keys(localStorage);
  } catch {
    return []; // the browser keeps nothing for this page
  }
}

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
