"""Hostile requests that know the API: tools, schemas, grammars, responses, messages, and how HTTP/1.1 frames what is sent.

`python -m tests.clients.hostile http://127.0.0.1:30000 20000` sends them to any server of a model with tools.
"""

import asyncio
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.clients.raw_http import connected

SECONDS = 60
"""What no request may take. A new grammar may take two seconds, and those before it as long."""
SENDERS = 4
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
SMUGGLED = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
"""After a request whose end is not clear, or in its body. It must not be answered."""
WORDS = ("", "a", "city", "x" * 300, "\u0000", "\ud800", "日本 😀", "__proto__", "$ref", "</tool_call>", "<think>", '{"name":')
REGEXES = (
    "a", "(a+)+$", "(a|aa)*b", "a{100000}", "(((((a{99}){99}){99}){99}){99})", "[", "(?=a)b", "(?P<x>a)(?P=x)", "\\p{L}{2,4}",
    "\\", "^$", "[^\\x00-\\uffff]", "(a?){60}a{60}", ".*.*.*.*x", "[a-\ud800]",
)  # fmt: skip
GRAMMARS = (
    "root ::= root", "start: start", "start: missing", "root ::= [a-", 'start: "a" start | "b"', 'root ::= ("a" | root root)*',
    "%llguidance {}", "start: /[/", 'start: "' + "x" * 5000 + '"', "root ::= " + "(" * 500, 'root ::= "日" | "\\ud800"',
    "%import common.NUMBER\nstart: NUMBER",
)  # fmt: skip


class Hostile(NamedTuple):
    """What goes over the wire, and how many answers it may get."""

    data: bytes
    answers: int
    """One, two where requests follow each other, or at most one if `unclear`."""
    unclear: bool
    """Where it ends can be read in two ways, or not at all: nothing that follows may be taken for a request."""


def word(chance: random.Random) -> str:
    """Mostly a harmless one: too much at once is refused for its first fault only."""
    return chance.choice(WORDS) if chance.random() < 0.3 else "city"


def schema(chance: random.Random, depth: int = 0) -> Any:
    """Of any shape, mostly one that JSON Schema has."""
    inner = (lambda: schema(chance, depth + 1)) if depth < 4 else (lambda: {"type": "null"})
    kinds: list[Callable[[], Any]] = [
        lambda: {
            "type": chance.choice(("string", "integer", "number", "boolean", "null", "array", "object", "x", ["string", "null"], 3))
        },
        lambda: {"type": "object", "properties": {word(chance): inner()}, "required": [word(chance)]},
        lambda: {
            "type": "array",
            "items": inner(),
            "minItems": chance.choice((0, 3, -1, 10**9)),
            "maxItems": chance.choice((0, 2, 10**12)),
        },
        lambda: {chance.choice(("anyOf", "oneOf", "allOf")): [inner() for _ in range(chance.choice((0, 1, 3)))]},
        lambda: {"type": "string", "pattern": chance.choice(REGEXES), "minLength": chance.choice((0, 5, 10**6))},
        lambda: {
            "type": "integer",
            "minimum": chance.choice((0, 5, -(2**70))),
            "maximum": chance.choice((1, 4, 2**70)),
            "multipleOf": 0.3,
        },
        lambda: {
            "$ref": chance.choice(("#", "#/$defs/a", "#/properties/a", "http://127.0.0.1:9/s", "file:///etc/passwd", "#/%zz"))
        },
        lambda: {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, inner()]}}, "$ref": "#/$defs/a"},
        lambda: {"enum": [word(chance), 1, None, {"a": [1]}], "const": word(chance)},
        lambda: {chance.choice(("not", "if", "contains", "propertyNames", "unevaluatedItems")): inner()},
        lambda: {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(300)}},
        lambda: {"x-guidance": {"whitespace_flexible": False}, "type": "object", "additionalProperties": inner()},
        lambda: chance.choice((True, False, None, [], "string", 3)),
    ]
    return chance.choice(kinds)()


def tool(chance: random.Random, shape: str) -> Any:
    """As the API of this shape writes it, or another."""
    name, parameters = chance.choice(("weather", "a" * 64, "a" * 65, "1 2", *WORDS)), schema(chance)
    match chance.choice((shape, shape, shape, "chat", "responses", "messages", "none")):
        case "chat":
            return {
                "type": "function",
                "function": {"name": name, "parameters": parameters, "strict": chance.choice((True, False, None))},
            }
        case "responses":
            return {"type": "function", "name": name, "parameters": parameters, "strict": chance.random() < 0.5}
        case "messages":
            return {"name": name, "input_schema": parameters, "description": word(chance)}
    return chance.choice((None, "weather", {"type": "web_search"}, {"type": "function"}, []))


def constraint(chance: random.Random) -> dict[str, Any]:
    """A field that asks for structured text, in any API's way."""
    wanted = schema(chance)
    return chance.choice(
        [
            {"response_format": {"type": "json_schema", "json_schema": {"name": word(chance), "schema": wanted, "strict": True}}},
            {"response_format": {"type": chance.choice(("json_object", "text", "xml"))}},
            {"json_schema": wanted if chance.random() < 0.5 else json.dumps(wanted)},
            {chance.choice(("regex", "guided_regex")): chance.choice(REGEXES)},
            {chance.choice(("ebnf", "guided_grammar")): chance.choice(GRAMMARS)},
            {
                "structured_outputs": {
                    chance.choice(("json", "regex", "grammar", "choice", "y")): chance.choice((wanted, *REGEXES, *GRAMMARS))
                }
            },
            {"guided_choice": [word(chance) for _ in range(chance.choice((0, 1, 3, 2000)))]},
            {"regex": "a", "ebnf": 'root ::= "a"'},
        ]
    )


def chat(chance: random.Random) -> tuple[str, dict[str, Any]]:
    call = {
        "id": word(chance),
        "type": "function",
        "function": {"name": "weather", "arguments": chance.choice(("{}", "{", "[]", "é"))},
    }
    messages = [
        {"role": "user", "content": word(chance)},
        {"role": "assistant", "content": None, "tool_calls": [call] * chance.choice((0, 1, 3))},
        {"role": "tool", "tool_call_id": word(chance), "content": chance.choice((*WORDS, None, 3))},
        {"role": chance.choice(("developer", "system", "function", "tool")), "content": [{"type": "text", "text": word(chance)}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
    ]
    body = {
        "messages": [*chance.sample(messages, chance.choice((0, 0, 1, 3))), messages[0]],
        "max_tokens": 8,
        "stream": chance.random() < 0.5,
    }
    if chance.random() < 0.5:
        named = {"type": "function", "function": {"name": chance.choice(("weather", "x"))}}
        body |= {"tools": [tool(chance, "chat") for _ in range(chance.choice((0, 1, 1, 2, 130)))]}
        body |= {
            "tool_choice": chance.choice(("auto", "required", "none", named, "x", None)),
            "parallel_tool_calls": chance.random() < 0.5,
        }
    if chance.random() < 0.3:
        body |= {"chat_template_kwargs": chance.choice(({"enable_thinking": False}, {"messages": []}, {"x": [[]] * 99}, 3))}
    return "/v1/chat/completions", body | (constraint(chance) if chance.random() < 0.2 else {})


def responses(chance: random.Random) -> tuple[str, dict[str, Any]]:
    said = word(chance)
    items = [
        {"role": "user", "content": said},
        {"type": "function_call", "call_id": said, "name": "weather", "arguments": chance.choice(("{}", "{", said))},
        {"type": "function_call_output", "call_id": chance.choice((said, "y")), "output": chance.choice((said, [], None))},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": said}]},
        {"type": chance.choice(("item_reference", "computer_call", "x")), "id": "i"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1:9/x"}]},
    ]
    text = {"format": {"type": "json_schema", "name": said, "schema": schema(chance), "strict": True}}
    body: dict[str, Any] = {"input": chance.choice((said, chance.sample(items, 3), items[:1], items[:1])), "max_output_tokens": 8}
    for field, value in {
        "tools": [tool(chance, "responses")],
        "text": text,
        "tool_choice": chance.choice(("required", {"type": "function", "name": "weather"}, {"type": "x"})),
        "previous_response_id": "resp_1",
        "store": chance.random() < 0.5,
        "stream": chance.random() < 0.5,
        "reasoning": {"effort": chance.choice(("none", "high", 3))},
        "include": ["x"],
    }.items():
        body |= {field: value} if chance.random() < 0.2 else {}
    return "/v1/responses", body


def messages(chance: random.Random) -> tuple[str, dict[str, Any]]:
    said = word(chance)
    blocks = [
        {"type": "text", "text": said},
        {"type": "tool_use", "id": said, "name": "weather", "input": chance.choice(({}, {"a": [[]]}, "{}", None))},
        {
            "type": "tool_result",
            "tool_use_id": chance.choice((said, "y")),
            "content": chance.choice((said, [], [{"type": "text", "text": said}])),
        },
        {"type": "thinking", "thinking": said, "signature": ""},
        {"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}},
    ]
    turns = [
        {"role": chance.choice(("user", "assistant", "assistant", "x")), "content": chance.sample(blocks, 2)}
        for _ in range(chance.choice((0, 0, 1, 3)))
    ]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": said}, *turns], "max_tokens": 8}
    for field, value in {
        "tools": [tool(chance, "messages") for _ in range(chance.randint(0, 2))],
        "tool_choice": {"type": chance.choice(("auto", "any", "tool", "none", "x")), "name": "weather"},
        "system": chance.choice((said, [{"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}])),
        "output_config": {"format": {"type": "json_schema", "schema": schema(chance)}},
        "thinking": {"type": chance.choice(("enabled", "disabled", "x")), "budget_tokens": 1},
        "stream": chance.random() < 0.5,
    }.items():
        body |= {field: value} if chance.random() < 0.2 else {}
    return chance.choice(("/v1/messages", "/v1/messages", "/v1/messages/count_tokens")), body


def generate(chance: random.Random) -> tuple[str, dict[str, Any]]:
    return "/generate", {"text": word(chance), "sampling_params": {"max_new_tokens": 8} | constraint(chance)}


BODIES = (chat, chat, responses, messages, generate)


def chunked(chance: random.Random, data: bytes) -> bytes:
    """In chunks of any sizes, some with extensions, then trailers."""
    sent = b""
    while data:
        size = min(len(data), chance.choice((1, 7, 100, 5000)))
        sent += f"{size:{chance.choice('xX')}}{chance.choice(('', ';a=b', ';x'))}\r\n".encode() + data[:size] + b"\r\n"
        data = data[size:]
    return sent + b"0\r\n" + chance.choice((b"", b"X-Trailer: y\r\n")) + b"\r\n"


def clear(chance: random.Random, path: str, body: bytes) -> Hostile:
    """Framed as RFC 9112 allows."""
    close = b"Connection: close\r\n"
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    length = b"Content-Length: %d\r\n" % len(body)
    target = path.encode()
    whole = head % target + close + length + b"\r\n" + body
    return chance.choice(
        [
            Hostile(whole, 1, False),
            Hostile(head % target + close + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(chance, body), 1, False),
            Hostile(b"\r\n" + whole, 1, False),
            Hostile(head % (b"http://x" + target) + close + length + b"\r\n" + body, 1, False),
            Hostile(head % target + length + b"\r\n" + body + whole, 2, False),
            Hostile(head % (target + b"?a=%00&b") + close + b"content-length:\t %d \r\n\r\n" % len(body) + body, 1, False),
        ]
    )


def unclear(chance: random.Random, path: str, body: bytes) -> Hostile:
    """Framed so that two readers may disagree, with a request after that nobody may answer."""
    size = len(body)
    lines = chance.choice(
        [
            b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n" % size,
            b"Content-Length: %d\r\nContent-Length: %d\r\n" % (size, size + len(SMUGGLED)),
            b"Content-Length: +%d\r\n" % size,
            b"Content-Length: %d, %d\r\n" % (size, size + 3),
            b"Content-Length: 0x%x\r\n" % size,
            b"Content-Length: -%d\r\n" % size,
            b"Content-Length : %d\r\n" % size,
            b"Content-Length: %d\r\n %d\r\n" % (size, size),
            b"Transfer-Encoding: identity\r\n",
            b"Transfer-Encoding: chunked, identity\r\n",
            b"Transfer-Encoding: xchunked\r\n",
            b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
            b"Transfer-Encoding:\x0bchunked\r\n",
            b"Transfer-Encoding: chunked\r\nA: \x00\r\n",
            b"Transfer-Encoding : chunked\r\n",
            b"A: b\rContent-Length: %d\r\n" % size,
        ]
    )
    chunks = chance.choice(
        (body, b"0\r\n\r\n", b"-1\r\n" + body, b"fffffffffffffffff\r\n" + body, b"1_0\r\n" + body, b"5 \r\n" + body)
    )
    content = chunks if b"hunked" in lines else body
    version = chance.choice((b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/9.9", b"http/1.1"))
    head = b"POST %s %s\r\nHost: x\r\nContent-Type: application/json\r\n" % (path.encode(), version)
    return Hostile(head + lines + b"\r\n" + content + SMUGGLED, 1, True)


def hostile(chance: random.Random) -> Hostile:
    """Any of them."""
    path, fields = chance.choice(BODIES)(chance)
    body = json.dumps(fields).encode()
    return unclear(chance, path, body) if chance.random() < 0.25 else clear(chance, path, body)


async def answered(url: str, request: Hostile) -> list[int]:
    """The statuses of all answers, until the server closes, or says nothing more where it can't tell what follows."""
    async with connected(url) as connection:
        await connection.send(request.data)
        received = b""
        while part := await connection.reader.read(1 << 16):
            received += part
    return [int(status) for status in STATUS.findall(received)]


async def send(url: str, requests: int, seed: int) -> Counter[int]:
    """Sends so many over a few connections at a time. Raises AssertionError for a 5xx, a hang, or a wrong number of answers."""
    statuses: Counter[int] = Counter()

    async def send_some(number: int) -> None:
        chance = random.Random(f"{seed} {number}")
        for _ in range(requests // SENDERS):
            request = hostile(chance)
            try:
                found = await asyncio.wait_for(answered(url, request), SECONDS)
            except (TimeoutError, ConnectionError) as error:
                found = [] if isinstance(error, ConnectionError) and request.unclear else [599]
            enough = len(found) <= request.answers if request.unclear else len(found) == request.answers
            assert enough and max(found, default=0) < 500, (found, request)
            statuses.update(found)

    await asyncio.gather(*map(send_some, range(SENDERS)))
    return statuses


if __name__ == "__main__":
    print(dict(asyncio.run(send(sys.argv[1], int(sys.argv[2]), seed=int(sys.argv[3]) if sys.argv[3:] else 0))))
