/* Elements: finding and making them. All text goes in as text, never as HTML. */

export function byId(id) {
  return document.getElementById(id);
}

/** An element with a class, text and attributes. */
export function make(tag, { className = "", text = "", ...attributes } = {}) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** A button that names what it does, for a listener that hears of all clicks of a list. */
export function actionButton(action, text, attributes = {}) {
  const button = make("button", { className: "quiet", text, type: "button", ...attributes });
  button.dataset.action = action;
  return button;
}

/** A token as a single line shows it: spaces and line breaks made visible. */
export function visible(text) {
  if (!text) return "◦"; // a part of a character, or a special token
  return text
    .replace(/ {3,}/g, (spaces) => `␣${spaces.length}`)
    .replace(/^ | $/g, "·")
    .replaceAll("\n", "↵")
    .replaceAll("\t", "⇥");
}

export function inSeconds(seconds) {
  if (seconds < 0.0005) return "0";
  return seconds < 0.9995 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

/** Copies a text and says so on the button. Browsers have a clipboard for pages only over HTTPS and on this machine. */
export async function copyFrom(button, text) {
  const before = (button.dataset.label ??= button.textContent);
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copyBySelection(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = before), 1500);
}

function copyBySelection(text) {
  const box = make("textarea", { className: "unseen" });
  const focused = document.activeElement;
  box.value = text;
  document.body.append(box);
  box.select();
  const isCopied = document.execCommand("copy");
  box.remove();
  focused?.focus();
  if (!isCopied) throw new Error("the browser does not copy");
}

/** An SVG element with attributes and text. */
export function draw(tag, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
}

/** The outline of a source's mark around a point: a disc, a triangle, both side by side, or a bar. */
export function markOf(source, x, y) {
  const disc = (at, size) => `M${at - size} ${y}a${size} ${size} 0 1 0 ${2 * size} 0a${size} ${size} 0 1 0 ${-2 * size} 0z`;
  const triangle = (at, size) => `M${at - size} ${y + size}h${2 * size}l${-size} ${-2 * size}z`;
  if (source === "by-head") return disc(x, 3.5);
  if (source === "by-ngram") return triangle(x, 3.5);
  if (source === "by-both") return disc(x - 3, 2.5) + triangle(x + 3, 2.5);
  return `M${x - 4} ${y - 1}h8v2h-8z`;
}
