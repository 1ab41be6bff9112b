"""What the sides of benchmarks.peers share: each reads one JSON request per line and answers with one line.

A side runs in a process of its own, maybe in another Python environment, so it imports nothing of this project but this file,
which lies beside it. It says which packages it needs, and what it offers once the model is loaded.

Requests: {"op": "versions"}
          {"op": "load", "model": DIRECTORY, "threads": N, "lookups": [N, ...], "context": TOKENS, "assistant": DIRECTORY | null}
          {"op": "generate", "contender": NAME, "way": NAME, "prompts": [[ids], ...], "max_tokens": N}
Answers:  {"versions": {PACKAGE: VERSION}}
          {"ways": {CONTENDER: [WAY, ...]}}
          {"seconds": SECONDS, "token_ids": [[ids], ...]}
          {"error": MESSAGE, "missing": true if a package has to be installed}
"""

import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TextIO

Generate = Callable[[list[int], int], list[int]]
"""Greedy, one prompt: its token ids and how many tokens to generate (nothing ends a text early), to the new token ids."""
Offer = dict[str, dict[str, Generate]]
"""The ways to run each contender, plain decoding or one with speculation, by their names. Who asks finds the fastest way."""
PLAIN, LOOKUP, ASSISTED = "plain", "prompt lookup", "assisted"


class Task(NamedTuple):
    """What to load, always in float32."""

    model: str
    """A directory as Hugging Face lays it out."""
    threads: int
    lookups: list[int]
    """How many tokens prompt lookup may propose: each is a way."""
    context: int
    """Tokens that the longest prompt and what is generated for it need."""
    assistant: str | None
    """The directory of a smaller model with the same tokenizer, for engines that can use one."""
    directory: str
    """Empty, for converted models; it goes when the process ends."""


def serve(packages: Sequence[str], load: Callable[[Task], Offer]) -> None:
    """Answers requests until there are no more. `packages` are distributions; "a|b": one of them is enough."""
    answers = _only_for_answers()
    offer: Offer = {}
    with tempfile.TemporaryDirectory() as directory:
        for line in sys.stdin:
            try:
                answer = _answer(json.loads(line), packages, load, offer, directory)
            except ImportError as error:
                answer = {"error": str(error), "missing": True}
            except Exception as error:  # every failure goes to the asking process, which decides what it means
                answer = {"error": f"{type(error).__name__}: {error}", "missing": False}
            print(json.dumps(answer), file=answers, flush=True)


def _answer(request: dict[str, Any], packages: Sequence[str], load: Callable[[Task], Offer], offer: Offer, directory: str) -> dict:
    operation = request.pop("op")
    if operation == "versions":
        return {"versions": dict(map(_version, packages)) | {"python": sys.version.split()[0]}}
    if operation == "load":
        offer.update(load(Task(**request, directory=directory)))
        return {"ways": {contender: list(ways) for contender, ways in offer.items()}}
    return _timed(offer[request["contender"]][request["way"]], request["prompts"], request["max_tokens"])


def _timed(generate: Generate, prompts: list[list[int]], max_tokens: int) -> dict:
    """One prompt after the other."""
    started = time.perf_counter()
    token_ids = [generate(prompt, max_tokens) for prompt in prompts]
    return {"seconds": time.perf_counter() - started, "token_ids": token_ids}


def _version(package: str) -> tuple[str, str]:
    """Which of the alternatives is installed, and its version."""
    for name in package.split("|"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ImportError(f"{package.replace('|', ' or ')} is not installed")


def _only_for_answers() -> TextIO:
    """The standard output. What a library prints, in Python or below, goes to the standard error: it can't garble the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers
