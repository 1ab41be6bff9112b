"""Generated cases of structured output: text under a tree is that of plain masked decoding, and fits.

python -m tests.grammar.cases --count 9000 runs many on tiny models, and says how many ended by themselves, fitted, and were equal.
"""

import argparse
import json
import random
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jsonschema

from jaxspec.config import PLAIN, TreeShape
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationOutput, GenerationRequest
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import tiny_engine, tiny_target

TREES = (TreeShape(3, 2, 6), TreeShape(5, 4, 16))
MORE_TREES = (*TREES, TreeShape(1, 2, 3), TreeShape(3, 1, 4))
LENGTH, PAGES = 72, 80
REGEXES = ("[a-c]{2,6}", "(yes|no)( sir)?", "[0-9]{1,3}(,[0-9]{3})*", r"\([a-z]+\)|[A-Z]{4}", "a+b+c?")
GRAMMARS = (
    ('root ::= "(" root ")" | [a-z]', r"\(*[a-z]\)*"),
    ('start: item ("," item)*\nitem: /[a-c]/ | "[" item "]"', r"[a-c,\[\]]+"),
)
"""Each with a regular expression that its texts match."""


class Case(NamedTuple):
    """One request."""

    prompt: tuple[int, ...]
    params: SamplingParams
    at_once: int
    """The number of requests that come together with it."""

    def fits(self, text: str) -> bool:
        """Whether a finished text is what was asked for, by other means than the grammar."""
        kind, value = self.params.constraint
        if kind == "json_schema":
            jsonschema.validate(json.loads(text), json.loads(value))
            return True
        if kind == "choice":
            return text in self.params.choice
        return re.fullmatch(dict(GRAMMARS).get(value, value), text) is not None


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose texts are short."""
    kinds = ["integer", "enum", "boolean", "string", "null", "const", "anyOf"] + ["array", "object"] * (depth < 2)
    match rng.choice(kinds) if depth else "object":
        case "integer":
            least = rng.randint(-50, 50)
            return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 200)}
        case "enum":
            return {"enum": rng.sample(["a", "bb", "ccc", "a b", 1, 22, None, True, 'x"y'], rng.randint(1, 4))}
        case "string":
            least = rng.randint(0, 2)
            chosen = rng.choice([{"pattern": "^[a-d]{1,4}$"}, {"minLength": least, "maxLength": least + 3}])
            return {"type": "string", **chosen}
        case "const":
            return {"const": rng.choice([0, "k", [1, 2], {"q": 1}])}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
        case "array":
            return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": rng.randint(0, 1), "maxItems": 2}
        case "object":
            names = rng.sample(["a", "bc", "d e", "long_name"], rng.randint(1, 2))
            properties = {name: random_schema(rng, depth + 1) for name in names}
            required = [name for name in names if rng.random() < 0.7]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case kind:
            return {"type": kind}


def random_case(rng: random.Random) -> Case:
    """Any of what a request may ask for."""
    constraint: dict[str, Any] = {"json_schema": random_schema(rng)}
    if rng.random() < 0.25:
        constraint = rng.choice(
            [
                {"regex": rng.choice(REGEXES)},
                {"grammar": rng.choice(GRAMMARS)[0]},
                {"choice": rng.sample(["on", "off", "onto"], 2)},
            ]
        )
    temperature = rng.choice([0, round(rng.uniform(0.1, 1.2), 2)])
    more = rng.choice(
        [{}, {}, {}, {"top_p": 0.9}, {"top_k": 5}, {"presence_penalty": 0.5}, {"min_tokens": 5}, {"ignore_eos": True}]
    )
    prompt = (*range(10, 10 + 4 * rng.randint(0, 3)), *(rng.randrange(1, 128) for _ in range(rng.randint(1, 6))))
    params = SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=rng.randrange(2**32), **constraint, **more)
    return Case(prompt, params, rng.randint(1, 8))


def engine(tree: TreeShape, **options: Any) -> Engine:
    """Of the tiny model that all cases share. It has few pages, so that requests are preempted."""
    target = tiny_target(num_layers=1, eos_token_ids=(0,))
    return tiny_engine(tree, target=target, max_running_requests=8, num_pages=PAGES, **options)


def run(made: Engine, cases: Sequence[Case]) -> list[GenerationOutput]:
    """Adds the cases in groups, each when at most half of the group before still runs."""
    requests, left = [], list(cases)
    while left or made.has_work:
        running = [request for request in requests if request.finish_reason is None]
        if left and len(running) <= 4:
            group, left = left[: left[0].at_once], left[left[0].at_once :]
            requests += [made.add(GenerationRequest(case.prompt, case.params)) for case in group]
        made.step()
    return [request.result() for request in requests]


class Result(NamedTuple):
    """What became of cases."""

    ended: int
    """By themselves."""
    wrong: list[Case]
    """Those that ended and do not fit."""
    unequal: list[tuple[TreeShape, Case]]
    preemptions: int
    hits: int
    """Tokens of prompts that were found in the prefix cache."""
    forced: int
    """Tokens that were drafted because nothing else could follow."""


def check(cases: Sequence[Case], trees: Sequence[TreeShape]) -> Result:
    """Runs the cases plain, one at a time; then each with one of the trees, with too few pages, some twice to meet a warm cache."""
    plain = engine(PLAIN, prefix_cache=False, overlap=False)
    expected = run(plain, cases)
    plain.grammars.close()
    wrong = [
        case for case, output in zip(cases, expected, strict=True) if output.finish_reason == "stop" and not case.fits(output.text)
    ]
    unequal, preemptions, hits, forced = [], 0, 0, 0
    for place, tree in enumerate(trees):
        made = engine(tree)
        own = list(range(place, len(cases), len(trees)))
        again = own + own[: len(own) // 8]
        for number, output in zip(again, run(made, [cases[number] for number in again]), strict=True):
            plainly = expected[number]
            if (output.token_ids, output.text, output.finish_reason) != (plainly.token_ids, plainly.text, plainly.finish_reason):
                unequal.append((tree, cases[number]))
        preemptions += made.stats().preemptions
        hits += made.stats().prefix_hit_tokens
        forced += made.stats().forced_tokens
        made.grammars.close()
    ended = sum(output.finish_reason == "stop" for output in expected)
    return Result(ended, wrong, unequal, preemptions, hits, forced)


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.grammar.cases", description=__doc__)
    parser.add_argument("--count", type=int, default=9000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng, started = random.Random(options.seed), time.perf_counter()
    result = check([random_case(rng) for _ in range(options.count)], MORE_TREES)
    seconds = time.perf_counter() - started
    print(f"{options.count} cases in {seconds:.0f} s: {result.ended} ended by themselves, {len(result.wrong)} of these do not fit")
    print(f"{len(result.unequal)} differ from plain masked decoding; {result.preemptions} preemptions")
    print(f"{result.hits} tokens from the prefix cache, {result.forced} forced drafts")
    for case in [*result.wrong, *result.unequal][:5]:
        print(case)


if __name__ == "__main__":
    main()
