"use strict";
/* What one answer brought, cycle by cycle, and the figures over it. Nothing here touches the document. */

const DEEPEST = 6; // drafts of this depth and deeper share a colour
const NO_TOKENS = { tokens: [], tree: null };
const KEPT_TREES = 2000; // older cycles of an answer lose their trees, so that a long answer stays small

/** An answer that is about to be asked for. Times are in milliseconds of performance.now(). */
function newRun(speculates) {
  return {
    speculates,
    isTraced: false, // events without a trace bring no tokens then: theirs came with another one
    state: "waiting", // then "running", and at the end "finished", "stopped" or "failed"
    cycles: [], // {index, tokens, tree, at, verified}
    text: "",
    tokens: 0,
    origins: {}, // how many tokens came from where
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
function addEvent(run, event, now) {
  const choice = event.choices?.[0];
  run.finishReason = choice?.finish_reason ?? run.finishReason;
  run.isTraced ||= Boolean(event.speculative_trace);
  const { tokens, tree } = run.isTraced ? (event.speculative_trace ?? NO_TOKENS) : untracedTokens(choice);
  if (!tokens.length) return null;
  run.state = "running";
  const cycle = { index: run.cycles.length, tokens, tree, at: now, verified: tokens[0].from !== "prefill" };
  run.cycles.push(cycle);
  if (run.cycles.length > KEPT_TREES) run.cycles[run.cycles.length - 1 - KEPT_TREES].tree = null;
  if (run.firstAt === null) {
    run.firstAt = now;
    run.firstTokens = tokens.length;
  }
  run.lastAt = now;
  run.longest = Math.max(run.longest, tokens.length);
  for (const token of tokens) countToken(run, token);
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

function countToken(run, token) {
  const origin = originOf(token);
  run.text += token.text;
  run.tokens += 1;
  run.origins[origin] = (run.origins[origin] ?? 0) + 1;
  if (token.from === "draft") run.drafted += 1;
}

/** The colour class of a token: d1 ... d6, bonus or plain. */
function originOf(token) {
  if (token.from === "draft") return `d${Math.min(Math.max(token.depth ?? 1, 1), DEEPEST)}`;
  return token.from === "bonus" ? "bonus" : "plain";
}

/** Where a token came from, in words. */
function originInWords(token) {
  if (token.from === "draft") return `accepted draft, depth ${token.depth}`;
  if (token.from === "bonus") return "bonus: the model's own, in the same pass";
  return token.from === "prefill" ? "from reading the prompt" : "plain decoding, one pass for one token";
}

/** The figures of an answer so far; null for what is not known yet. */
function figuresOf(run) {
  const seconds = (run.lastAt - run.firstAt) / 1000;
  const { cycles, tokens } = run.verified;
  return {
    tokens: run.tokens,
    perSecond: run.firstAt !== null && seconds > 0 ? (run.tokens - run.firstTokens) / seconds : null,
    acceptLength: cycles ? tokens / cycles : null,
    firstTokenSeconds: run.firstAt === null ? null : (run.firstAt - run.askedAt) / 1000,
    draftShare: run.tokens ? run.drafted / run.tokens : null,
    seconds: ((run.endedAt ?? run.lastAt ?? run.askedAt) - run.askedAt) / 1000,
  };
}

/** What a race of two finished answers showed; null if one of them did not finish. */
function raceVerdict(on, off) {
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
