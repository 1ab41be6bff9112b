"""Compiling grammars with llguidance, within limits. What has not been compiled before is tried first in a process that can be
killed, which executes this same file: a hostile schema may take any time or memory, or overflow the stack.

The file imports nothing of jaxspec, so that the process starts fast. It reads one JSON object per line from its standard input, a
socket: first {"vocabulary"}, then {"kind", "text"} of each grammar. The reply is {"bytes"}, what the grammar takes of memory, or
{"error"}.
"""

import contextlib
import json
import os
import resource
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import llguidance

LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""A state takes 1 to 2 kB. The other limits are llguidance's own: a mask takes 20 ms at most."""
WHITESPACE = r"(?:\x20|\x0A[\x20\x09]{0,20})"
"""Between the tokens of JSON: a space, or a line break with indentation. A model can't fill its budget with spaces."""
MAX_MEMORY = 2**30
"""Bytes of the process's address space; the vocabulary of a large model takes 0.2 GB of them."""
ORPHAN_SECONDS = 20
"""After which the process ends itself, in case its server is gone and can't stop it."""
MAX_REASON = 300
"""Characters of an error."""
MOST_TRIES = 50
"""Parts of a schema that are compiled to find the one at fault."""
LEAST_BYTES = 2**16
"""What a grammar counts at least."""
OF_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else")
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
OF_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
"""Keywords whose values are a schema, schemas by name, and a list of schemas."""


class VocabularySource(NamedTuple):
    """What llguidance must know of a tokenizer, in a form that a process can be sent."""

    tokenizer: str | None
    """A tokenizer.json."""
    tokens: Sequence[str] | None
    """In place of a tokenizer, the bytes of every token, as Latin-1."""
    size: int
    """Of the model's vocabulary."""
    ends: Sequence[int]
    """The end-of-sequence tokens."""

    def load(self) -> llguidance.LLTokenizer:
        """Takes up to a second."""
        if self.tokenizer is not None:
            return llguidance.LLTokenizer(self.tokenizer, n_vocab=self.size, eos_token=list(self.ends) or None)
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(self.tokens or ())))


class _Tokens:
    """Tokens by their bytes, as TokenizerWrapper takes them. Their end of sequence is a token of its own, behind the vocabulary."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[str]):
        self.tokens = [*(token.encode("latin-1") for token in tokens), b"<end>"]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [len(tokens)]
        self._ids = {token: number for number, token in reversed([*enumerate(self.tokens[:-1])]) if token}
        self._longest = max(map(len, self.tokens))

    def __call__(self, text: bytes) -> list[int]:
        """The longest tokens, from left to right."""
        ids: list[int] = []
        while text:
            size = next((size for size in range(self._longest, 0, -1) if text[:size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[text[:size]])
            text = text[size:]
        return ids


def compiled(vocabulary: llguidance.LLTokenizer, kind: str, text: str) -> llguidance.LLMatcher:
    """The matcher at the grammar's beginning. `kind`: the field of SamplingParams, whose value is `text`.

    Raises ValueError, with the reason and, for a schema, the place.
    """
    if kind != "json_schema":
        return _matcher(vocabulary, _grammar(kind, text))
    schema = json.loads(text)
    try:
        return _matcher(vocabulary, _grammar_of_schema(schema))
    except ValueError as error:
        place = _place(vocabulary, schema, str(error))
        raise ValueError(f"{error} (at {place})") from None


def _grammar_of_schema(schema: Mapping[str, Any]) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": WHITESPACE})


def _grammar(kind: str, text: str) -> str:
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    return llguidance.grammar_from({"grammar": "grammar", "choice": "choice"}[kind], text)  # type: ignore[arg-type]


def _matcher(vocabulary: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(" ".join(matcher.get_error().split())[:MAX_REASON])
    return matcher


def _place(vocabulary: llguidance.LLTokenizer, schema: Any, reason: str) -> str:
    """The innermost part of the schema that can't be compiled for the same reason, as a JSON pointer."""
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    place, tries = "#", MOST_TRIES
    while True:
        for name, part in _parts(schema):
            tries -= 1
            if tries < 0:
                return place
            try:
                _matcher(vocabulary, _grammar_of_schema(definitions | part))
            except ValueError as error:
                if str(error) == reason:
                    place, schema = f"{place}/{name}", part
                    break
        else:
            return place


def _parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly inside one."""
    found = [(name, schema[name]) for name in OF_ONE if name in schema]
    for name in OF_NAMES:
        found += [(f"{name}/{key}", part) for key, part in _items(schema.get(name))]
    for name in OF_MANY:
        found += [(f"{name}/{number}", part) for number, part in enumerate(_list(schema.get(name)))]
    return ((name, part) for name, part in found if isinstance(part, dict))


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# Everything below runs in the process.


class GrammarTrial:
    """Compiles what it is sent, to see whether it can be."""

    def __init__(self) -> None:
        self._vocabulary: llguidance.LLTokenizer | None = None

    def reply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one line."""
        if "vocabulary" in request:
            self._vocabulary = VocabularySource(**request["vocabulary"]).load()
            return {"bytes": 0}
        assert self._vocabulary is not None
        before = _used_bytes()
        try:
            matcher = compiled(self._vocabulary, request["kind"], request["text"])
            return {"bytes": max(_used_bytes() - before, len(request["text"]) + LEAST_BYTES), "ended": matcher.is_stopped()}
        except ValueError as error:
            return {"error": str(error)}
        except RecursionError:
            return {"error": "it is nested too deeply"}


def _used_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Answers until the other end is closed, which also happens when the server ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the server, which may still have requests
    for kind, most in ((resource.RLIMIT_AS, MAX_MEMORY), (resource.RLIMIT_CORE, 0)):
        allowed = resource.getrlimit(kind)[1]
        limit = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        with contextlib.suppress(ValueError):  # macOS can't limit the address space; the limit of time remains
            resource.setrlimit(kind, (limit, limit))
    trial = GrammarTrial()
    with contextlib.suppress(ConnectionError), socket.socket(fileno=0) as connection, connection.makefile("rb") as lines:
        for line in lines:
            signal.alarm(ORPHAN_SECONDS)  # without a handler it ends the process at any point
            connection.sendall(json.dumps(trial.reply(json.loads(line))).encode() + b"\n")
            signal.alarm(0)


if __name__ == "__main__":
    main()
