"""A server without a model, for what the built-in one can't show: Markdown, hostile text, failures, any tree and any pace.

Words in square brackets in the prompt say what happens: [hostile], [unicode], [markdown], [thinks], [empty], [400], [503],
[breaks], [ends early], [differs], [slow], [waits], [no trace], and [merged]: several drafters. A schema cuts two drafts of every
tree; one with "not" is refused.
To look at the page with it: python -m tests.browser.mock_server
"""

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from jaxspec.server.playground import playground_routes

CODE = '''
        self._items = []
        self._limit = None

    def push(self, item):
        """Puts an item on top. Raises OverflowError if the stack is full."""
        if self._limit is not None and len(self._items) >= self._limit:
            raise OverflowError("the stack is full")
        self._items.append(item)

    def pop(self):
        """Takes the item on top away and returns it."""
        if not self._items:
            raise IndexError("pop from an empty stack")
        return self._items.pop()

    def __len__(self):
        return len(self._items)
'''
UNICODE = "Grüße, 日本語のテキスト: 猫は投機的に推測する。 emoji 👩‍🚀 naïve café — done.\n"
HOSTILE = '<img src=x onerror="window.hacked=1"> <script>window.hacked=2</script> &amp; </svg><b>bold</b> ]]> ${7*7}\n'
MARKDOWN = """## A heading with *weight*

A **strong** word, `code_in_line()`, a [link](https://example.com/) and a [bad one](javascript:alert(1)).

1. First
2. Second, of
   two lines
   - nested **deeper**

> A quotation

```python
def reverse(text):
    return text[::-1]  # "1. 2. 3."
```

| left | right |
|------|------:|
| a    |     1 |

<b>markup</b> stays &amp; text.
"""
THINKING = "Let me see.\nYes."
STEPS, TOPK, NODES = 5, 4, 8
SOURCES = ("head", "ngram", "head+ngram", "other")
CUT = {"pruned": [" the", "\n"], "forced": 1}


@dataclass
class Cycle:
    """The traced tokens of one pass, and its tree."""

    tokens: list[dict[str, Any]]
    tree: dict[str, Any] | None


def create_mock(pace: float = 0.02, api_key: str | None = None, has_chat: bool = True, tells: bool = True) -> FastAPI:
    """The application; `pace` is the number of seconds that one pass takes. Unless it `tells`, it has only the model's name."""
    app = FastAPI(openapi_url=None)
    app.include_router(playground_routes())
    app.state.bodies = []
    app.state.programs = {"ready": 9, "total": 9}
    app.state.waiting = 0

    @app.middleware("http")
    async def check_key(request: Request, call_next: Any) -> Response:
        if api_key and request.url.path != "/" and request.headers.get("authorization") != f"Bearer {api_key}":
            return refusal(401, "send the server's API key as Authorization: Bearer <key>")
        return await call_next(request)

    @app.get("/v1/models")
    async def models() -> Response:
        card = {"id": "mock-7b", "object": "model", "max_model_len": 4096}
        return JSONResponse({"object": "list", "data": [card | ({"capabilities": {"chat": has_chat}} if tells else {})]})

    @app.get("/server_info")
    async def server_info() -> Response:
        if not tells:
            return refusal(404, "unknown endpoint /server_info")
        trees = {"tree": "5/4/8", "speculative_trees": ["5/4/8", "3/1/4", "5/8/64", "7/4/8/3", "0/1/1"]}
        return JSONResponse(trees | {"programs": app.state.programs})

    @app.get("/v1/loads")
    async def loads() -> Response:
        return JSONResponse({"aggregate": {"total_waiting_reqs": app.state.waiting}})

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Response:
        body = await request.json()
        app.state.bodies.append(body)
        prompt = body.get("prompt") or body["messages"][-1]["content"]
        if "[400]" in prompt:
            return refusal(400, "temperature must be a number from 0 to 2, got 7", "temperature")
        if "not" in body.get("response_format", {}).get("json_schema", {}).get("schema", {}):
            return refusal(400, "response_format.json_schema.schema can't be compiled: unimplemented keys: not", "response_format")
        if "messages" in body and not has_chat:
            return refusal(400, "messages: this model has no chat template; use /v1/completions", "messages")
        if "[503]" in prompt:
            return refusal(503, "1024 requests wait already and --max-queued-requests is 1024: try again later")
        return StreamingResponse(stream(body, prompt, pace), media_type="text/event-stream")

    return app


def refusal(status: int, message: str, param: str | None = None) -> Response:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "param": param, "code": status}}, status)


async def stream(body: dict[str, Any], prompt: str, pace: float) -> AsyncIterator[str]:
    """The events of an answer."""
    texts = {"[hostile]": HOSTILE * 3, "[unicode]": UNICODE * 3, "[markdown]": MARKDOWN, "[empty]": ""}
    text = next((text for word, text in texts.items() if word in prompt), CODE * 4)
    speculative = body["speculative"]
    if "[differs]" in prompt and speculative.get("enabled") is False:
        text = text.replace("OverflowError", "ValueError", 1)
    speculates = speculative.get("enabled") is not False
    steps, topk = speculative.get("num_steps", STEPS), speculative.get("eagle_topk", TOPK)
    nodes = speculative.get("num_draft_tokens", NODES)
    seed = body.get("seed") or 0
    yield ": keep-alive\n\n"
    await asyncio.sleep(6 if "[waits]" in prompt else pace * 4)
    if "[thinks]" in prompt:
        thought = {"from": "plain", "text": f"<think>{THINKING}</think>\n\n"}
        delta = {"choices": [{"index": 0, "delta": {"reasoning_content": THINKING}, "finish_reason": None}]}
        yield f"data: {json.dumps(delta | {'speculative_trace': {'tokens': [thought], 'tree': None}})}\n\n"
    words = (split(text) or [""])[: body.get("max_tokens") or 16]
    verified = 0
    for number, cycle in enumerate(cycles(words, steps, topk, nodes, random.Random(seed)) if speculates else plain(words)):
        if cycle.tree and "response_format" in body:
            cycle.tree |= CUT
        if cycle.tree and "[merged]" in prompt:
            cycle.tree["sources"] = [SOURCES[(number + node) % 4] for node in range(1, len(cycle.tree["tokens"]))]
        if number == 0 and "messages" in body:  # as the real server does: the role first, with the trace of what comes next
            role, first = event(body, Cycle(cycle.tokens, None), text=""), event(body, None, text=cycle.tokens[0]["text"])
            yield role + first
        else:
            yield event(body, cycle, "".join(token["text"] for token in cycle.tokens))
        verified += number > 0
        await asyncio.sleep(pace * (8 if "[slow]" in prompt else 1))
        if number == 6 and "[breaks]" in prompt:
            error = {"message": "the engine failed while it worked on this request", "code": 500}
            yield f"data: {json.dumps({'error': error})}\n\ndata: [DONE]\n\n"
            return
        if number == 6 and "[ends early]" in prompt:
            return
    length = (len(words) - 1) / max(verified, 1)
    last = {"choices": [], "usage": {}, "metrics": {"speculative_decoding": {"mean_acceptance_length": round(length, 4)}}}
    reason = "stop" if text in (MARKDOWN, "") else "length"
    yield f"data: {json.dumps({'choices': [choice(body, '', reason)]})}\n\n"
    yield f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n"


def split(text: str) -> list[str]:
    """Something like tokens. Of a character beyond ASCII the first token has no text: it holds a part of it."""
    words = re.findall(r"\n *| ?[a-z]{1,5}|[A-Z][a-z]*|[ -~]|[^ -~]", text)
    return [part for word in words for part in ([word] if word.isascii() else ["", word])]


def plain(words: Sequence[str]) -> list[Cycle]:
    return [Cycle([{"id": 7, "text": word, "from": "plain" if number else "prefill"}], None) for number, word in enumerate(words)]


def cycles(words: Sequence[str], steps: int, topk: int, nodes: int, chance: random.Random) -> list[Cycle]:
    """The words in passes: of each tree a random number of drafts is right."""
    result = [Cycle([{"id": 7, "text": words[0], "from": "prefill"}], None)]
    done = 1
    while done < len(words):
        right = min(steps if chance.random() < 0.25 else chance.randrange(steps + 1), len(words) - done)
        tree, path = draw_tree(words, done, right, steps, topk, nodes, chance)
        tokens = [{"id": 100 + level, "text": words[done + level], "from": "draft", "depth": level + 1} for level in range(right)]
        if done + right < len(words):
            tokens.append({"id": 99, "text": words[done + right], "from": "bonus"})
        result.append(Cycle(tokens, {**tree, "accepted": path, "shape": f"{steps}/{topk}/{nodes}"}))
        done += len(tokens)
    return result


def draw_tree(
    words: Sequence[str], done: int, right: int, steps: int, topk: int, nodes: int, chance: random.Random
) -> tuple[dict[str, Any], list[int]]:
    """A tree in which the accepted path is the next words, and the rest guesses that failed."""
    others = ["self", " the", " None", "(", ")", ".append", " item", "\n        ", " raise", "_", " if", "<b>", " =="]
    texts, parents, depths, path = [words[done - 1]], [-1], [0], [0]
    for level in range(1, steps + 1):
        above = [node for node, depth in enumerate(depths) if depth == level - 1]
        for place in range(topk if len(above) else 0):
            if len(texts) >= nodes - max(right - level, 0):
                break
            is_right = level <= right and place == min(topk - 1, done % 2)
            parent = path[level - 1] if is_right or level - 1 < len(path) else chance.choice(above)
            if is_right:
                path.append(len(texts))
            texts.append(words[done + level - 1] if is_right else chance.choice(others))
            parents.append(parent)
            depths.append(level)
        if level <= right and len(path) == level:
            path.append(len(texts))
            texts.append(words[done + level - 1])
            parents.append(path[level - 1])
            depths.append(level)
    return {"tokens": texts, "parents": parents}, path


def event(body: dict[str, Any], cycle: Cycle | None, text: str) -> str:
    chunk: dict[str, Any] = {"choices": [choice(body, text, None)]}
    if cycle is not None and "[no trace]" not in json.dumps(body):
        chunk["speculative_trace"] = {"tokens": cycle.tokens, "tree": cycle.tree}
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"


def choice(body: dict[str, Any], text: str, reason: str | None) -> dict[str, Any]:
    said = {"delta": {"content": text}} if "messages" in body else {"text": text}
    return {"index": 0, **said, "finish_reason": reason}


if __name__ == "__main__":
    uvicorn.run(create_mock(), port=30001)
