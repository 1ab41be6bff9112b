"""Requests that deserve no answer but a refusal, drawn at random from a seed."""

import json
import random
from typing import Any

from tests.clients.raw_http import request

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
VALID: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "def f(x):", "max_tokens": 2, "temperature": 0.5, "stop": ["x"], "logprobs": 1, "n": 1},
    CHAT: {"messages": [{"role": "user", "content": "x = 1"}], "max_tokens": 2, "top_p": 0.9, "seed": 3, "logit_bias": {"7": 1}},
    GENERATE: {"text": "import os", "sampling_params": {"max_new_tokens": 2, "temperature": 0}, "stream": False},
    "/v1/responses": {"input": "x = 1", "max_output_tokens": 2, "temperature": 0.5, "instructions": "Code.", "tool_choice": "auto"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x = 1"}], "max_tokens": 2, "top_k": 5, "stop_sequences": ["y"]},
    "/tokenize": {"prompt": "def f(x):", "add_special_tokens": False},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/abort_request": {"rid": "unknown"},
}
WRONG_VALUES: list[Any] = [
    {}, [], [[]], [{}], [None], {"a": {"b": []}}, -1, 2**63, -(2**80), 1e308, 10**400, "\ud800", [-1], [2**40], ["x", 1],
    [[1], "x"], {"": ""}, [True], [0.5], {"1": "x"}, [["x"]], [[[1]]],
]  # fmt: skip
"""Wrong values for a required field, or else for a field of numbers."""
NO_JSON = [
    b"", b"{", b"}", b"null", b"[]", b"3", b'"text"', b"\xff\xfe", b"\x00", b"{'prompt': 'x'}", b'{"prompt": "x"',
    b'{"prompt": "x",}', b'{"prompt": NaN}', b'{"prompt": Infinity}', b"[" * 20_000, b'{"a":' * 20_000, b'{"prompt": "\xc3"}',
    b"prompt=x&max_tokens=3", b'{"prompt": "x"} {"prompt": "y"}', b"<xml/>", b'{"prompt": 1' + b"0" * 5000 + b"}",
]  # fmt: skip
REQUIRED = {COMPLETIONS: "prompt", CHAT: "messages", GENERATE: "text", "/v1/responses": "input", "/v1/messages": "messages",
            "/tokenize": "prompt", "/detokenize": "tokens", "/abort_request": "rid"}  # fmt: skip
BREAKING_OFF = [
    b"this is not HTTP\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: five\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\"pro",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 9_000 + b"\r\n",
    b"POST /v1/compl",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a browser that tries TLS
    b"",
]  # fmt: skip
"""What leaves the connection unusable: the client hangs up afterwards."""


def malformed(chance: random.Random) -> tuple[bytes, bool]:
    """A request, and whether it may be fine by accident (a changed letter of the prompt is not an error)."""
    path = chance.choice(list(VALID))
    kind = chance.randrange(5)
    if kind == 0:
        return request(path, chance.choice(NO_JSON)), False
    if kind == 1:
        tokenizer = path in ("/tokenize", "/detokenize")  # an empty list is fine there
        return request(path, VALID[path] | {REQUIRED[path]: chance.choice(WRONG_VALUES)}), tokenizer
    if kind == 2:
        return request(path, VALID[path] | {f"unknown_{chance.randrange(1000)}": chance.choice(WRONG_VALUES)}), False
    if kind == 3:
        wrong = chance.choice(
            [
                request(path, VALID[path], kind=chance.choice(["text/plain", "application/x-www-form-urlencoded"])),
                request(path, VALID[path], method=chance.choice(["DELETE", "PATCH", "OPTIONS"])),
                request(f"{path}/{chance.randrange(1000)}", VALID[path]),
                request(path, {f"field_{index}": index for index in range(300)}),
                request(COMPLETIONS, {"prompt": "x " * 200_000}),
                request(COMPLETIONS, {"prompt": ["x"] * 5000}),
            ]
        )
        return wrong, False
    return request(path, mutated(json.dumps(VALID[path]).encode(), chance)), True


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, doubled or left out, but for digits: numbers of tokens stay small."""
    result = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        position = chance.randrange(len(result))
        if chr(result[position]).isdecimal():
            continue
        choice = chance.randrange(3)
        if choice == 0:
            result[position] = chance.choice(b'"{}[],:\\ \x00\xe9ax')
        elif choice == 1:
            del result[position : position + chance.randint(1, 6)]
        else:
            result[position:position] = chance.choice([b'"', b"[", b"}", b",", b"null", b"\xf0\x9f", b"\\u0000"])
    return bytes(result)
