/* What the page knows while it is open, and who changes it. What outlasts it is in store.js. */

export const FRAME = 70; // milliseconds between two drawings of an answer that is written: the model may share this machine

export const state = {
  card: null, // the model as the server lists it: page.js
  kind: "chat", // of new conversations, or "text": page.js
  conversation: null, // the one on the screen: chat.js
  opened: new Map(), // id -> conversation, of those that were opened, whose runs are still here: chat.js
  turns: [], // its messages on the screen: chat.js
  stopper: null, // an AbortController while something is written: chat.js and race.js
  runs: new WeakMap(), // message -> its run, if it was written since the page was opened: chat.js
  inspected: null, // {run, view}: the answer that the panel is about: cycles.js
  race: [], // the runs of a race, with speculation first: race.js
  shown: null, // {cycle, pointed}: whose tree is drawn: cycles.js
  treeAt: 0, // when it was drawn
  stripFrom: 0, // the first cycle in the strip
  replay: null, // the timer of a replay: cycles.js
};
