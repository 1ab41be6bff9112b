import { readJson } from "./server.js";
/* What is waited for, in words, and how long it will take, as far as that can be known. */

const ASK_AGAIN = 2000; // milliseconds

/** How long a number of equal steps will still take. Each look corrects it: also one that finds no progress. */
export class Forecast {
  constructor() {
    this.first = this.last = null; // {done, at}
  }

  /** Seconds left, null if nothing is known yet. `now` is in milliseconds. */
  left(done, total, now) {
    this.first ??= { done, at: now };
    if (this.last?.done !== done) this.last = { done, at: now };
    const since = (now - this.last.at) / 1000;
    const steps = done - this.first.done;
    if (!steps) return null;
    const each = Math.max((this.last.at - this.first.at) / 1000 / steps, since); // the one under way may be a long one
    return Math.max(each * (total - done) - since, 1);
  }
}

export function aboutSeconds(seconds) {
  if (seconds === null) return "";
  return seconds < 90 ? `, about ${Math.ceil(seconds)} s left` : `, about ${Math.round(seconds / 60)} min left`;
}

/** Tells what an answer waits for, until `isOver`. */
export async function tellWaiting(tell, isOver, key) {
  const began = performance.now();
  const programs = new Forecast();
  let reason = "Reading the prompt";
  let askAt = began + ASK_AGAIN / 2;
  while (!isOver()) {
    const now = performance.now();
    if (now >= askAt) {
      reason = (await waitingReason(programs, key)) ?? reason;
      askAt = performance.now() + ASK_AGAIN;
      if (isOver()) return;
    }
    const seconds = Math.floor((performance.now() - began) / 1000);
    tell(seconds ? `${reason} · ${seconds} s so far` : `${reason}…`);
    await new Promise((resolve) => setTimeout(resolve, 250));
  }
}

async function waitingReason(forecast, key) {
  const [loads, info] = await Promise.all([readJson("/v1/loads", key), readJson("/server_info", key)]);
  if (!loads.status && !info.status) return "The server does not answer";
  const waiting = loads.json?.aggregate?.total_waiting_reqs ?? 0;
  if (waiting > 1) return `Waiting behind ${waiting - 1} other ${waiting === 2 ? "request" : "requests"}`;
  const { ready, total } = info.json?.programs ?? {};
  if (ready < total) {
    const left = aboutSeconds(forecast.left(ready, total, performance.now()));
    return `Reading the prompt, while the server compiles (${ready} of ${total} programs${left})`;
  }
  return "Reading the prompt";
}

/** While programs compile in the background, tells how many are there. Ends when `isOver`. */
export async function tellPrograms(tell, isOver, key) {
  const forecast = new Forecast();
  for (;;) {
    const { ready, total } = (await readJson("/server_info", key)).json?.programs ?? {};
    if (isOver()) return;
    if (!(ready < total)) return tell("");
    tell(` · compiling: ${ready} of ${total} programs${aboutSeconds(forecast.left(ready, total, performance.now()))}`);
    await new Promise((resolve) => setTimeout(resolve, ASK_AGAIN));
  }
}
