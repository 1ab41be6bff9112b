import { make } from "./dom.js";
/* Markdown as elements. marked's lexer says what a text's parts are; each becomes an element here, and text goes in as text. So no
   string ever becomes HTML: markup in an answer is shown as it was written, and the page's policy can forbid HTML altogether.

   Every part knows where its characters stand in the source (`places`, one index for each), so that `paint(text, places)` can give
   each the colour of its token. */

const INLINE = { strong: "strong", em: "em", del: "del" };
const DEEPEST_NESTING = 24;
const SAFE_LINK = /^(https?:\/\/|mailto:)/i;

/** The blocks of a text, one after another: {raw, token}. Their raw texts joined are the text. What is nested too deep to be meant
    as such, or even to be read, is a paragraph. */
export function markdownBlocks(text) {
  try {
    const tokens = globalThis.marked.lexer(text);
    return tokens.map((token) => ({ raw: token.raw, token: isDeeper(token, DEEPEST_NESTING) ? asParagraph(token.raw) : token }));
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    return [{ raw: text, token: asParagraph(text) }];
  }
}

function asParagraph(raw) {
  return { type: "paragraph", raw, text: raw };
}

function isDeeper(token, depth) {
  const parts = token.type === "table" ? [token.header, ...token.rows].flat() : (token.items ?? token.tokens ?? []);
  return parts.length > 0 && (depth === 0 || parts.some((part) => isDeeper(part, depth - 1)));
}

/** A block as an element, null for the space between two. */
export function drawBlock(token, places, paint) {
  switch (token.type) {
    case "space":
      return null;
    case "hr":
      return make("hr");
    case "heading":
      return fill(make(`h${Math.min(token.depth + 2, 6)}`), token, places, paint);
    case "code":
      return drawCode(token, places, paint);
    case "blockquote":
      return fill(make("blockquote"), token, places, paint);
    case "list":
      return drawList(token, places, paint);
    case "table":
      return drawTable(token, places, paint);
    case "paragraph":
    case "text":
      return fill(make("p"), token, places, paint);
    default: // HTML and definitions of links
      return leaf(make("p"), token.raw, places, paint);
  }
}

/** Puts a token's parts into an element: blocks, pieces of a line, or its text. */
function fill(element, token, places, paint) {
  if (!token.tokens) return leaf(element, token.text ?? token.raw, textPlaces(token, places), paint);
  element.append(...children(token.tokens, token.text, textPlaces(token, places), paint));
  return element;
}

function leaf(element, text, places, paint) {
  element.append(...paint(text, places));
  return element;
}

function children(tokens, text, places, paint) {
  return inOrder(tokens, text, places)
    .flatMap(([token, part]) => drawPart(token, part, paint))
    .filter((node) => node !== null);
}

/** Each token with the places of its source, which it has within its parent's text. */
function inOrder(tokens, text, places) {
  let at = 0;
  return tokens.map((token) => {
    const found = text.indexOf(token.raw, at);
    const start = found < 0 ? at : found;
    at = start + token.raw.length;
    return [token, places.slice(start, at)];
  });
}

/** A part of a line, or a block within a block. */
function drawPart(token, places, paint) {
  switch (token.type) {
    case "text":
    case "escape":
      if (token.tokens) return children(token.tokens, token.text, textPlaces(token, places), paint);
      return paint(token.text, textPlaces(token, places));
    case "strong":
    case "em":
    case "del":
      return fill(make(INLINE[token.type]), token, places, paint);
    case "codespan":
      return leaf(make("code"), token.text, textPlaces(token, places), paint);
    case "br":
      return make("br");
    case "checkbox":
      return `${token.checked ? "☑" : "☐"} `;
    case "link":
      return drawLink(token, places, paint);
    case "image": // the policy lets none load
      return paint(token.raw, places);
    case "html":
      return paint(token.raw, places);
    default:
      return drawBlock(token, places, paint);
  }
}

function drawLink(token, places, paint) {
  if (!SAFE_LINK.test(token.href)) return paint(token.raw, places);
  return fill(make("a", { href: token.href, target: "_blank", rel: "noopener noreferrer" }), token, places, paint);
}

function drawCode(token, places, paint) {
  const box = make("div", { className: "code" });
  const head = make("div", { className: "code-head" });
  const copy = make("button", { className: "quiet", text: "Copy", type: "button", "aria-label": "Copy the code" });
  copy.dataset.action = "copy-code";
  head.append(make("span", { text: token.lang || "code" }), copy);
  const block = make("pre", { tabindex: "0", role: "region", "aria-label": "Code" });
  block.append(leaf(make("code"), token.text, textPlaces(token, places), paint));
  box.append(head, block);
  return box;
}

function drawList(token, places, paint) {
  const list = make(token.ordered ? "ol" : "ul");
  if (token.ordered && token.start > 1) list.setAttribute("start", token.start);
  for (const [item, part] of inOrder(token.items, token.raw, places)) {
    const element = fill(make("li"), item, part, paint);
    element.classList.toggle("task", item.task);
    list.append(element);
  }
  return list;
}

function drawTable(token, places, paint) {
  const box = make("div", { className: "table", tabindex: "0", role: "region", "aria-label": "Table" });
  const table = make("table");
  let at = 0;
  for (const row of [token.header, ...token.rows]) {
    const line = make("tr");
    for (const cell of row) {
      const start = Math.max(token.raw.indexOf(cell.text, at), at);
      at = start + cell.text.length;
      const element = make(cell.header ? "th" : "td", cell.header ? { scope: "col" } : {});
      element.append(...children(cell.tokens, cell.text, places.slice(start, at), paint));
      if (cell.align) element.classList.add(cell.align);
      line.append(element);
    }
    table.append(line);
  }
  box.append(table);
  return box;
}

/** Where the characters of a token's text stand: its source without markup, line by line. */
function textPlaces(token, places) {
  const text = token.text ?? token.raw;
  const isFenced = token.type === "code" && /^ {0,3}(`{3}|~{3})/.test(token.raw);
  const lines = token.raw.split("\n");
  const isNested = token.type === "list_item" || token.type === "blockquote" || token.type === "code"; // markup comes before
  const result = [];
  let at = isFenced ? lines.shift().length + 1 : 0;
  for (const line of text.split("\n")) {
    const raw = lines.shift() ?? "";
    const found = isNested ? raw.lastIndexOf(line) : raw.indexOf(line);
    for (let index = 0; index < line.length; index += 1) result.push(places[at + Math.max(found, 0) + index]);
    result.push(places[at + raw.length]); // the line's end
    at += raw.length + 1;
  }
  return result;
}
