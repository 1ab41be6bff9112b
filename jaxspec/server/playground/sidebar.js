import { actionButton, byId, make } from "./dom.js";
import { state } from "./state.js";
import { conversations, inMarkdown, titleOf } from "./store.js";
/* The list of conversations. */

export function drawSidebar() {
  const items = conversations().map((conversation) => {
    const title = titleOf(conversation);
    const item = make("li");
    const open = actionButton("open", title, { title: new Date(conversation.changed).toLocaleString() });
    if (conversation.id === state.conversation?.id) open.setAttribute("aria-current", "true");
    item.dataset.id = conversation.id;
    item.append(open, actionButton("delete", "×", { "aria-label": `Delete “${title}”`, title: "Delete" }));
    return item;
  });
  byId("conversations").replaceChildren(...items);
  byId("none-kept").hidden = items.length > 0;
}

/** Saves the conversation on the screen as a file. */
export function exportConversation() {
  const url = URL.createObjectURL(new Blob([inMarkdown(state.conversation)], { type: "text/markdown" }));
  make("a", { href: url, download: "conversation.md" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
