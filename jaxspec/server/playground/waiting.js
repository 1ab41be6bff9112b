import { readJson } from "./server.js";
/* What is waited for, in words, and how long it will take, as far as that can be known. */

const ASK_AGAIN = 2000; // milliseconds

function aboutSeconds(seconds) {
  if (!seconds) return "";
  return seconds < 90 ? `, about ${seconds} s left` : `, about ${Math.round(seconds / 60)} min left`;
}

/** Tells what an answer waits for, until `isOver`. */
export async function tellWaiting(tell, isOver, key) {
  const began = performance.now();
  let reason = "Reading the prompt";
  let askAt = began + ASK_AGAIN / 2;
  while (!isOver()) {
    const now = performance.now();
    if (now >= askAt) {
      reason = (await waitingReason(key)) ?? reason;
      askAt = performance.now() + ASK_AGAIN;
      if (isOver()) return;
    }
    const seconds = Math.floor((performance.now() - began) / 1000);
    tell(seconds ? `${reason} · ${seconds} s so far` : `${reason}…`);
    await new Promise((resolve) => setTimeout(resolve, 250));
  }
}

async function waitingReason(key) {
  const [loads, info] = await Promise.all([readJson("/v1/loads", key), readJson("/server_info", key)]);
  if (!loads.status && !info.status) return "The server does not answer";
  const waiting = loads.json?.aggregate?.total_waiting_reqs ?? 0;
  if (waiting > 1) return `Waiting behind ${waiting - 1} other ${waiting === 2 ? "request" : "requests"}`;
  const { ready, total, seconds_left } = info.json?.programs ?? {};
  if (ready < total) {
    return `Reading the prompt, while the server compiles (${ready} of ${total} programs${aboutSeconds(seconds_left)})`;
  }
  return "Reading the prompt";
}

/** While programs compile in the background, tells how many are there. Ends when `isOver`. */
export async function tellPrograms(tell, isOver, key) {
  for (;;) {
    const { ready, total, seconds_left } = (await readJson("/server_info", key)).json?.programs ?? {};
    if (isOver()) return;
    if (!(ready < total)) return tell("");
    tell(` · compiling: ${ready} of ${total} programs${aboutSeconds(seconds_left)}`);
    await new Promise((resolve) => setTimeout(resolve, ASK_AGAIN));
  }
}
