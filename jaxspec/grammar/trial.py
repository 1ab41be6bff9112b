"""The process that compiles a grammar first, and can be killed: a hostile schema may take any time, memory or depth of the stack.

It executes this file, and reads one JSON object per line from its standard input, a socket: first {"vocabulary"}, then {"kind",
"text"} of each grammar. The reply is {"bytes"}, what the grammar takes of memory, or {"error"}.
"""

import json
import os
import resource
import sys
from collections.abc import Mapping
from typing import Any

import llguidance

from jaxspec.child_process import answer
from jaxspec.grammar.compiling import VocabularySource, compiled

MAX_MEMORY = 2**30
"""Bytes of the process's address space; the vocabulary of a large model takes 0.2 GB of them."""
MAX_STACK = 2**20
"""Bytes; the server's threads, which compile what was tried, have at least twice as many, however large its own stack may get."""
STATM = "/proc/self/statm"
MAX_REASON = 190
"""Characters of an error, which may repeat parts of the grammar."""
LEAST_BYTES = 2**18  # what a grammar counts at least: with use it grows (1,007 hostile ones took 254 kB each, 28 November 2026)


class GrammarTrial:
    """Compiles what it is sent, to see whether it can be."""

    def __init__(self) -> None:
        self._vocabulary: llguidance.LLTokenizer | None = None

    def reply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if "vocabulary" in request:
            self._vocabulary = VocabularySource(**request["vocabulary"]).load()
            return {"bytes": 0}
        assert self._vocabulary is not None
        before = _used_bytes()
        try:
            matcher = compiled(self._vocabulary, request["kind"], request["text"])
            return {"bytes": max(_used_bytes() - before, len(request["text"]) + LEAST_BYTES), "ended": matcher.is_stopped()}
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
            half = MAX_REASON // 2  # the place is at the end
            return {"error": reason if len(reason) <= MAX_REASON else f"{reason[:half]} ... {reason[-half:]}"}


def _used_bytes() -> int:
    """Memory of this process; without /proc, as on macOS, the most that it had."""
    try:
        with open(STATM) as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    trial = GrammarTrial()
    limits = {resource.RLIMIT_AS: MAX_MEMORY, resource.RLIMIT_STACK: MAX_STACK, resource.RLIMIT_CORE: 0}
    answer(lambda line: json.dumps(trial.reply(json.loads(line))).encode(), limits)


if __name__ == "__main__":
    main()
