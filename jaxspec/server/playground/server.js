/* Talks to the server that served this page. Nothing here touches the document. */

/** A failure, with the server's message. `status` is 0 if there was no response, or if it failed midway. */
export class ServerError extends Error {
  constructor(status, message, param) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

function authorization(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** The status and JSON of a GET; the JSON is null if it failed, the status 0 if there was no answer. */
export async function readJson(path, key) {
  try {
    const response = await fetch(path, { headers: authorization(key) });
    return { status: response.status, json: response.ok ? await response.json() : null };
  } catch {
    return { status: 0, json: null };
  }
}

/** Posts a request and gives every event of the answer to onEvent. Resolves when the stream has ended in order. */
export async function streamAnswer(path, body, key, signal, onEvent) {
  const headers = { "Content-Type": "application/json", ...authorization(key) };
  let response;
  try {
    response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  } catch (error) {
    if (signal.aborted) throw error;
    throw new ServerError(0, "Can't connect to the server.");
  }
  if (!response.ok) throw await refusalOf(response);
  for await (const event of serverEvents(response, signal)) {
    if (event.error) throw new ServerError(0, event.error.message ?? "The request failed.", event.error.param);
    onEvent(event);
  }
}

/** The events of a stream, up to [DONE]. One that breaks off before it is a ServerError. */
async function* serverEvents(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const blocks = (text + value).split("\n\n");
      text = blocks.pop();
      for (const block of blocks) {
        if (!block.startsWith("data:")) continue; // a comment that keeps the connection alive
        const data = block.slice("data:".length).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } catch (error) {
    if (signal.aborted) throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new ServerError(0, "The connection ended before the answer did.");
}

/** The error in a response other than 200. */
async function refusalOf(response) {
  const body = await response.json().catch(() => null);
  const said = body?.error?.message ?? `${response.status} ${response.statusText}`;
  return new ServerError(response.status, said, body?.error?.param ?? null);
}
