"""Requests made from /openapi.json at random, and then changed: wrong types, odd numbers, missing, strange and repeated fields.

`python -m tests.clients.grammar http://127.0.0.1:30000 20000` sends them to any server.
"""

import json
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 17, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e-320, 1e308, "", " ", "x", "0", "é", "\ud800",
    "\u0000", "a" * 300, "{{ 7 * 7 }}", "../../etc/passwd", [], {}, [[]], [None], [-1], [2**40], ["a", 1], {"a": {}}, {"": []},
    [0] * 300, ["x"] * 300,
)  # fmt: skip
STRINGS = ("a", "def f(x):\n", "日本 😀", "hello " * 20, "user", "text")
DEEPEST = 4
SENDERS = 4


class Request(NamedTuple):
    """What goes over the wire."""

    method: str
    path: str
    headers: dict[str, str]
    content: bytes


class Grammar:
    """Makes requests for the operations of a document."""

    def __init__(self, document: dict, chance: random.Random):
        self._schemas, self._chance = document["components"]["schemas"], chance
        self._operations = [(path, method, each) for path, item in document["paths"].items() for method, each in item.items()]
        self._weights = [4 if "requestBody" in each else 1 for *_, each in self._operations]

    def request(self) -> Request:
        """A request that is right by the document, or nearly."""
        chance = self._chance
        [(path, method, operation)] = chance.choices(self._operations, self._weights)
        path = path.replace("{name}", chance.choice(("jaxspec-demo", "x", "%2e%2e", "%ff", "a" * 200)))
        if chance.random() < 0.1:
            path += "?" + chance.choice(("timeout=1", "timeout=x", "a=b&a=c", "%00", "timeout=" + "9" * 300))
        headers, content = {}, b""
        if "requestBody" in operation:
            body = self.value(operation["requestBody"]["content"]["application/json"]["schema"])
            for _ in range(chance.choice((0, 0, 1, 1, 2, 5))):
                body = self.changed(body)
            content = json.dumps(bounded(body)).encode()
            headers["content-type"] = "application/json"
            if chance.random() < 0.05:
                content = self.broken(content)
            if chance.random() < 0.03:
                headers["content-type"] = chance.choice(("text/plain", "application/json; charset=utf-16", "", "application/xml"))
        if chance.random() < 0.03:
            headers[chance.choice(("x-request-id", "authorization", "accept", "origin"))] = chance.choice(("", "x", "b" * 500))
        if chance.random() < 0.03:
            method = chance.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"))
        return Request(method.upper(), path, headers, content)

    def value(self, schema: dict, depth: int = 0) -> Any:
        """A value that the schema allows, as far as that is simple."""
        chance = self._chance
        if "$ref" in schema:
            return self.value(self._schemas[schema["$ref"].rpartition("/")[2]], depth)
        if choices := schema.get("anyOf") or schema.get("oneOf"):
            return self.value(chance.choice(choices), depth)
        if "enum" in schema or "const" in schema:
            return chance.choice(schema.get("enum", [schema.get("const")]))
        match schema.get("type"):
            case "object":
                return self.object(schema, depth)
            case "array":
                count = chance.randint(schema.get("minItems", 0), 3) if depth < DEEPEST else 0
                return [self.value(schema.get("items", {}), depth + 1) for _ in range(count)]
            case "string":
                return chance.choice(STRINGS)[: schema.get("maxLength")]
            case "integer" | "number" as kind:
                least, most = schema.get("minimum", -3), min(schema.get("maximum", 9), 200)
                return (
                    chance.randint(int(least), int(max(least, most)))
                    if kind == "integer"
                    else chance.uniform(least, max(least, most))
                )
            case "boolean":
                return chance.random() < 0.5
            case "null":
                return None
        return chance.choice(ODD)

    def object(self, schema: dict, depth: int) -> dict:
        """All required fields and few others, as most make a request refuse others."""
        chance, fields = self._chance, schema.get("properties", {})
        needed = schema.get("required", ())
        share = chance.choice((0.02, 0.1, 0.3))
        names = [name for name in fields if name in needed or chance.random() < share]
        return {name: self.value(fields[name], depth + 1) for name in names}

    def changed(self, value: Any) -> Any:
        """One place of a JSON value changed."""
        chance = self._chance
        if isinstance(value, dict) and value and chance.random() < 0.9:
            name = chance.choice(list(value))
            match chance.randrange(6):
                case 0:
                    return {other: item for other, item in value.items() if other != name}
                case 1:
                    return value | {chance.choice(("", "x" * 300, "seed", "stream", "n", "__class__")): value[name]}
                case 2:
                    return value | {name: [value[name]] * chance.choice((1, 2, 300))}
            return value | {name: self.changed(value[name])}
        if isinstance(value, list) and value and chance.random() < 0.5:
            place = chance.randrange(len(value))
            return [*value[:place], self.changed(value[place]), *value[place + 1 :]]
        return chance.choice(ODD)

    def broken(self, content: bytes) -> bytes:
        """Not JSON any more, or deeper than anybody needs."""
        place = self._chance.randrange(len(content) + 1)
        piece = self._chance.choice((b"\xff", b'"', b"}", b"[" * 3000, b"\\u", b"NaN", b"", b"//"))
        return content[:place] + piece + content[place + self._chance.randrange(3) :]


def bounded(body: Any) -> Any:
    """The same with at most 8 tokens: 20,000 requests are about refusals more than about texts."""
    if not isinstance(body, dict):
        return body
    if isinstance(params := body.get("sampling_params"), dict):
        return body | {"sampling_params": {"max_new_tokens": 8} | params | least(params, "max_new_tokens") | least(params, "n")}
    if "input" in body:
        return {"max_output_tokens": 8} | body | least(body, "max_output_tokens") | least(body, "n")
    names = ("max_tokens", "max_completion_tokens")
    body = body | {key: item for name in (*names, "n") for key, item in least(body, name).items()}
    endless = ("prompt" in body or "messages" in body) and all(body.get(name) is None for name in names)
    return body | {"max_tokens": 8} if endless else body


def least(body: dict, name: str) -> dict[str, int]:
    """A smaller value for a field that is there and a number."""
    value = body.get(name)
    return {name: min(value, 8 if name != "n" else 2)} if type(value) is int else {}


def send(url: str, requests: int, seed: int) -> Counter[int]:
    """Sends so many requests over a few connections; returns the statuses that came back.

    Raises AssertionError for a 5xx, and for a refusal that is long or not in its endpoint's shape.
    """
    document = httpx.get(f"{url}/openapi.json", timeout=60).json()
    statuses: Counter[int] = Counter()

    def send_some(number: int) -> None:
        grammar = Grammar(document, random.Random(seed + number))
        with httpx.Client(base_url=url, timeout=120) as http:
            for _ in range(requests // SENDERS):
                method, path, headers, content = grammar.request()
                response = http.request(method, path, headers=headers, content=content)
                status, text = response.status_code, response.text
                statuses[status] += 1
                assert status == 200 or (status < 500 and len(text) < 3000), (method, path, content[:1000], text)
                if status != 200 and method != "HEAD":
                    expected = {"type", "message"} if path.startswith("/v1/messages") else {"message", "type", "param", "code"}
                    assert set(response.json()["error"]) - {"details"} == expected, text  # Anthropic's errors may have these

    with ThreadPoolExecutor(SENDERS) as pool:
        list(pool.map(send_some, range(SENDERS)))
    return statuses


if __name__ == "__main__":
    print(dict(send(sys.argv[1], int(sys.argv[2]), seed=0)))
