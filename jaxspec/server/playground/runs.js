/* What one answer brought, cycle by cycle, and the figures over it. Nothing here touches the document. */

export const DEEPEST = 6; // drafts of this depth and deeper share a colour
const SOURCES = { head: "by-head", ngram: "by-ngram", "head+ngram": "by-both" }; // colour classes, where drafters are merged
const OTHER = "by-other"; // what filled the tree, or was forced by a grammar
const NO_TOKENS = { tokens: [], tree: null };
const KEPT_TREES = 2000; // older cycles of an answer lose their trees, so that a long answer stays small

/** An answer that is about to be asked for. Times are in milliseconds of performance.now(). */
export function newRun(speculates) {
  return {
    speculates,
    isTraced: false, // events without a trace bring no tokens then: theirs came with another one
    state: "waiting", // then "running", and at the end "finished", "stopped" or "failed"
    cycles: [], // {index, tokens, tree, at, verified}
    text: "", // of all tokens
    content: "", // the answer without the thinking, where the server tells them apart
    thinking: "",
    pieces: [], // of the text, one for each token that has some: {start, origin, cycle, place}
    tokens: 0,
    origins: {}, // how many tokens came from where
    proposed: {}, // how many nodes of the trees came from which source, where drafters are merged
    drafted: 0,
    longest: 0, // tokens of the cycle that brought most
    verified: { cycles: 0, tokens: 0 }, // passes after the prompt's
    askedAt: performance.now(),
    firstAt: null,
    firstTokens: 0, // how many came with the first event: their time is the prompt's
    lastAt: null,
    endedAt: null,
    finishReason: null,
  };
}

/** Adds an event of the stream. Returns the cycle that it brought, or null. */
export function addEvent(run, event, now) {
  const choice = event.choices?.[0];
  run.finishReason = choice?.finish_reason ?? run.finishReason;
  run.thinking += choice?.delta?.reasoning_content ?? "";
  run.content += choice?.text ?? choice?.delta?.content ?? "";
  run.isTraced ||= Boolean(event.speculative_trace);
  const { tokens, tree } = run.isTraced ? (event.speculative_trace ?? NO_TOKENS) : untracedTokens(choice);
  if (!tokens.length) return null;
  run.state = "running";
  tokens.forEach((token) => (token.source = token.from === "draft" ? sourceOf(tree, tree?.accepted[token.depth]) : undefined));
  for (const node of tree?.sources?.keys() ?? []) {
    const source = sourceOf(tree, node + 1);
    run.proposed[source] = (run.proposed[source] ?? 0) + 1;
  }
  const cycle = { index: run.cycles.length, tokens, tree, at: now, verified: tokens[0].from !== "prefill" };
  run.cycles.push(cycle);
  if (run.cycles.length > KEPT_TREES) run.cycles[run.cycles.length - 1 - KEPT_TREES].tree = null;
  if (run.firstAt === null) {
    run.firstAt = now;
    run.firstTokens = tokens.length;
  }
  run.lastAt = now;
  run.longest = Math.max(run.longest, tokens.length);
  tokens.forEach((token, place) => countToken(run, token, cycle.index, place));
  if (cycle.verified) {
    run.verified.cycles += 1;
    run.verified.tokens += tokens.length;
  }
  return cycle;
}

/** From a server that does not trace: the text as a plain token. */
function untracedTokens(choice) {
  const text = choice?.text ?? choice?.delta?.content ?? "";
  return { tokens: text ? [{ text, from: "plain" }] : [], tree: null };
}

function countToken(run, token, cycle, place) {
  const origin = originOf(token);
  if (token.text) run.pieces.push({ start: run.text.length, origin, cycle, place });
  run.text += token.text;
  run.tokens += 1;
  run.origins[origin] = (run.origins[origin] ?? 0) + 1;
  if (token.from === "draft") run.drafted += 1;
}

/** The colour class of who proposed a node; undefined where one drafter proposes all. */
export function sourceOf(tree, node) {
  if (!tree?.sources || !(node > 0)) return undefined;
  return SOURCES[tree.sources[node - 1]] ?? OTHER;
}

/** The answer so far, as a view shows it: what was thought before is left out. */
export function answerOf(run) {
  const text = run.content;
  const offset = run.text.startsWith(text) && !run.thinking ? 0 : Math.max(run.text.lastIndexOf(text), 0);
  return { text, pieces: run.pieces, offset, run };
}

/** The colours of an answer in a few characters, to be kept: "plain:3 d1:5 bonus:2", a length for each token. */
export function coloursOf({ text, pieces, offset }) {
  const ends = [...pieces.slice(1).map((piece) => piece.start), offset + text.length];
  const parts = pieces.map((piece, index) => [piece.origin, ends[index] - Math.max(piece.start, offset)]);
  return parts.flatMap(([origin, length]) => (length > 0 ? `${origin}:${length}` : [])).join(" ");
}

/** The pieces of an answer that was kept. */
export function piecesOf(colours) {
  let start = 0;
  return [...(colours ?? "").matchAll(/(d[1-6]|by-(?:head|ngram|both|other)|bonus|plain):(\d+)/g)].map(([, origin, length]) => {
    const piece = { start, origin };
    start += Number(length);
    return piece;
  });
}

/** The colour class of a token: of a draft's source, if there are several, else of its depth, d1 ... d6; bonus or plain. */
export function originOf(token) {
  if (token.from === "draft") return token.source ?? `d${Math.min(Math.max(token.depth ?? 1, 1), DEEPEST)}`;
  return token.from === "bonus" ? "bonus" : "plain";
}

export const SOURCE_NAMES = { "by-head": "head", "by-ngram": "n-grams", "by-both": "both", "by-other": "other" };

/** Who proposed a draft, as it follows other words; nothing where one drafter proposes all. */
export function sourceInWords(source) {
  if (!source) return "";
  return source === OTHER ? ", filled in or forced" : `, from ${source === "by-both" ? "head and n-grams" : `the ${SOURCE_NAMES[source]}`}`;
}

/** Where a token came from, in words. */
export function originInWords(token) {
  if (token.from === "draft") return `accepted draft, depth ${token.depth}${sourceInWords(token.source)}`;
  if (token.from === "bonus") return "bonus: the model's own, in the same pass";
  return token.from === "prefill" ? "from reading the prompt" : "plain decoding, one pass for one token";
}

/** The figures of an answer so far; null for what is not known yet. */
export function figuresOf(run) {
  const seconds = (run.lastAt - run.firstAt) / 1000;
  const { cycles, tokens } = run.verified;
  return {
    tokens: run.tokens,
    passes: cycles,
    passTokens: tokens, // of those passes: the prompt's brought one more
    perSecond: run.firstAt !== null && seconds > 0 ? (run.tokens - run.firstTokens) / seconds : null,
    acceptLength: cycles ? tokens / cycles : null,
    firstTokenSeconds: run.firstAt === null ? null : (run.firstAt - run.askedAt) / 1000,
    draftShare: run.tokens ? run.drafted / run.tokens : null,
    seconds: ((run.endedAt ?? run.lastAt ?? run.askedAt) - run.askedAt) / 1000,
  };
}

/** What a race of two finished answers showed; null if one of them did not finish. */
export function raceVerdict(on, off) {
  if (on.state !== "finished" || off.state !== "finished") return null;
  const [fast, slow] = [figuresOf(on).perSecond, figuresOf(off).perSecond];
  return { ratio: fast && slow ? fast / slow : null, same: on.text === off.text, differsAt: firstDifference(on.text, off.text) };
}

/** Index of the first character that differs, or -1. */
function firstDifference(a, b) {
  if (a === b) return -1;
  let index = 0;
  while (index < a.length && index < b.length && a[index] === b[index]) index += 1;
  return index;
}
