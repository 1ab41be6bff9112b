"""Generated cases of structured output: text under a tree is that of plain masked decoding, and fits.

python -m tests.grammar.cases --model tiny --kind json --record runs many, in parts of one seed each, and says how many ended by
themselves, fitted and were equal. Each part adds a line to cases.jsonl; parts that are there are not run again.
"""

import argparse
import datetime
import importlib.metadata
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator, FormatChecker

from jaxspec.engine.engine import Engine
from jaxspec.engine.program_cache import enable_compilation_cache
from jaxspec.engine.request import GenerationRequest, Request
from jaxspec.load import LoadedModels, load_models
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import largest_sizes_only, tiny_engine, tiny_target
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.engine.served import lose_halves_now_and_then
from tests.grammar.parts import Part, Recognizer, as_ebnf, as_lark, as_regex, random_part, random_rules

TREES = (TreeShape(3, 2, 6), TreeShape(5, 4, 16))
MORE_TREES = (*TREES, TreeShape(1, 2, 3), TreeShape(3, 1, 4), PLAIN)
LENGTH, PAGES, ENOUGH_PAGES = 72, 80, 300
"""Tokens of a text at most; pages that are too few for eight of them, and pages that are not."""
MODELS = {"tiny": (9000, 1000), "demo": (900, 300), "smollm2": (100, 50)}
"""How many cases there are to be, and how many share a seed."""
RECORD = Path(__file__).with_name("cases.jsonl")
TEXT = "a list of all names and numbers in this city, please: {value} def return import x [1] 日本"


FORMATS = FormatChecker(())


@FORMATS.checks("date", raises=ValueError)
def is_date(text: object) -> bool:
    """Python knows no year 0, which RFC 3339 has."""
    return not isinstance(text, str) or bool(datetime.date.fromisoformat(text.replace("0000-", "2000-", 1)))


class Case(NamedTuple):
    """One request."""

    prompt: tuple[int, ...]
    params: SamplingParams
    at_once: int
    """The number of requests that come together with it."""
    rules: Mapping[str, Part] = {}
    """What a regex or a grammar was written from."""

    def fits(self, text: str) -> bool:
        """Whether a finished text is what was asked for, by other means than the grammar."""
        kind, value = self.params.constraint
        if kind == "json_schema":
            return Draft202012Validator(json.loads(value), format_checker=FORMATS).is_valid(json.loads(text))
        return text in self.params.choice if kind == "choice" else Recognizer(self.rules, text).accepts()


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose texts are short."""
    kinds = ["integer", "step", "enum", "boolean", "string", "null", "const", "anyOf", "types", "date"]
    match rng.choice(kinds + ["array", "tuple", "tree", "map", "object", "allOf"] * (depth < 2)) if depth else "object":
        case "integer":
            least = rng.randint(-50, 50)
            return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 200)}
        case "step":
            return {"type": "integer", "multipleOf": rng.choice([2, 5, 7]), "exclusiveMinimum": 0, "exclusiveMaximum": 60}
        case "enum":
            return {"enum": rng.sample(["a", "bb", "ccc", "a b", 1, 22, None, True, 'x"y', "\n"], rng.randint(1, 4))}
        case "string":
            least = rng.randint(0, 2)
            chosen = rng.choice([{"pattern": "^[a-d]{1,4}$"}, {"minLength": least, "maxLength": least + 3}])
            return {"type": "string", **chosen}
        case "date":
            return {"type": "string", "format": "date"}
        case "const":
            return {"const": rng.choice([0, "k", [1, 2], {"q": 1}])}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
        case "types":
            return {"type": rng.sample(["boolean", "null", "string"], 2), "maxLength": 3}
        case "array":
            return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": rng.randint(0, 1), "maxItems": 2}
        case "tuple":
            return {"type": "array", "prefixItems": [random_schema(rng, depth + 1)], "items": {"type": "null"}, "maxItems": 2}
        case "tree":
            return {"$ref": "#/$defs/tree"}
        case "map":
            return {"type": "object", "patternProperties": {"^x[ab]$": random_schema(rng, depth + 1)}, **CLOSED, "maxProperties": 2}
        case "allOf":
            parts = [{"type": "object", "properties": {name: random_schema(rng, 2)}, "required": [name]} for name in "ab"]
            return {"allOf": parts, "maxProperties": 2}
        case "object":
            names = rng.sample(["a", "bc", "d e", "long_name"], rng.randint(1, 2))
            properties = {name: random_schema(rng, depth + 1) for name in names}
            required = [name for name in names if rng.random() < 0.7]
            made = {"type": "object", "properties": properties, "required": required, **CLOSED}
            return made if depth else {"$defs": {"tree": TREE}, **made}
        case kind:
            return {"type": kind}


CLOSED = {"additionalProperties": False}
TREE = {
    "type": "object",
    "properties": {"v": {"enum": [1, 2]}, "n": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}},
    "required": ["v"],
    **CLOSED,
}


def random_constraint(rng: random.Random, kind: str) -> tuple[dict[str, Any], Mapping[str, Part]]:
    """A field of SamplingParams, and what its text was written from."""
    if kind == "mixed":
        kind = rng.choice(["json"] * 6 + ["regex", "grammar"])
    if kind == "json":
        return {"json_schema": random_schema(rng)}, {}
    if kind == "grammar":
        rules = random_rules(rng)
        return {"grammar": rng.choice([as_ebnf, as_lark])(rules)}, rules
    if rng.random() < 0.1:
        return {"choice": rng.sample(["on", "off", "onto", "o", "no, that is not it"], 3)}, {}
    part = random_part(rng)
    return {"regex": as_regex(part)}, {"start": part}


def random_case(rng: random.Random, kind: str = "mixed", model: str = "tiny") -> Case:
    """Any of what a request may ask for."""
    constraint, rules = random_constraint(rng, kind)
    temperature = rng.choice([0, round(rng.uniform(0.1, 1.2), 2)])
    fields = [{"top_p": 0.9}, {"top_k": 5}, {"presence_penalty": 0.5}, {"min_tokens": 5}, {"ignore_eos": True}]
    more = rng.choice([{}, {}, {}, *fields])
    params = SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=rng.randrange(2**32), **constraint, **more)
    return Case(random_prompt(rng, model), params, rng.randint(1, 8), rules)


def random_prompt(rng: random.Random, model: str) -> tuple[int, ...]:
    """Many begin alike."""
    if model == "tiny":
        return (*range(10, 10 + 4 * rng.randint(0, 3)), *(rng.randrange(1, 128) for _ in range(rng.randint(1, 6))))
    texts = TEXT.split()
    words = [*texts[: 4 * rng.randint(0, 3)], *rng.choices(texts, k=rng.randint(1, 6))]
    return tuple(loaded(model).tokenizer.encode(" ".join(words)))


@cache
def loaded(model: str) -> LoadedModels:
    return load_models(None if model == "demo" else model, progress=False)


def engine(tree: TreeShape, model: str = "tiny", *, all_sizes: bool = False, **options: Any) -> Engine:
    """Of the model that all cases share. Few pages: requests are preempted. `all_sizes`: programs of all batch sizes."""
    options = {"max_running_requests": 8, "num_pages": PAGES, **options}
    if model == "tiny":
        return tiny_engine(tree, target=tiny_target(num_layers=1, eos_token_ids=(0,)), **options)
    of = loaded(model)
    more = {"prefill_chunk": 16, "page_size": 4, "context_length": 128, **options}
    made = Engine(of.target, of.head if tree.num_steps else None, of.tokenizer, tree, of.config.__class__(**more))
    if not all_sizes:
        largest_sizes_only(made)
    return made


class Text(NamedTuple):
    """What became of a case."""

    token_ids: tuple[int, ...]
    text: str
    """Or why it was refused."""
    finish_reason: str


def run(made: Engine, cases: Sequence[Case]) -> list[Text]:
    """Adds the cases in groups, each when at most half of the group before still runs."""
    requests, left = list[Request | str](), list(cases)
    while left or made.has_work:
        running = [request for request in requests if isinstance(request, Request) and request.finish_reason is None]
        if left and len(running) <= 4:
            group, left = left[: left[0].at_once], left[left[0].at_once :]
            requests += [add(made, case) for case in group]
        made.step()
    return list(map(text_of, requests))


def add(made: Engine, case: Case) -> Request | str:
    """The request, or why it was refused."""
    try:
        return made.add(GenerationRequest(case.prompt, case.params))
    except ValueError as error:
        return str(error)


def text_of(request: Request | str) -> Text:
    if isinstance(request, str):
        return Text((), request, "refused")
    output = request.result()
    return Text(tuple(output.token_ids), output.text, str(output.finish_reason))


class Result(NamedTuple):
    """What became of cases."""

    ended: int
    """By themselves."""
    refused: list[tuple[Case, str]]
    """Those that the library can't compile, and why."""
    wrong: list[Case]
    """Those that ended and do not fit."""
    unequal: list[tuple[TreeShape, Case]]
    preemptions: int
    hits: int
    """Tokens of prompts that were found in the prefix cache."""
    forced: int
    """Tokens that were drafted because nothing else could follow."""


class Bench:
    """A plain engine, and one for each of some trees."""

    def __init__(self, trees: Sequence[TreeShape], model: str = "tiny"):
        self._plain = engine(PLAIN, model, prefix_cache=False, overlap=False, num_pages=ENOUGH_PAGES)
        self._trees = [(tree, engine(tree, model)) for tree in trees]
        for _, made in self._trees:
            lose_halves_now_and_then(made)

    def check(self, cases: Sequence[Case]) -> Result:
        """Runs the cases plain; then each with one of the trees, with too few pages, some twice to meet a warm cache."""
        expected, before = run(self._plain, cases), self._counts()
        unequal = []
        for place, (tree, made) in enumerate(self._trees):
            own = list(range(place, len(cases), len(self._trees)))
            again = own + own[: len(own) // 8]
            found = run(made, [cases[number] for number in again])
            unequal += [(tree, cases[number]) for number, text in zip(again, found, strict=True) if text != expected[number]]
        pairs = list(zip(cases, expected, strict=True))
        ended = [(case, text) for case, text in pairs if text.finish_reason == "stop"]
        wrong = [case for case, text in ended if not case.fits(text.text)]
        refused = [(case, text.text) for case, text in pairs if text.finish_reason == "refused"]
        counts = (after - earlier for after, earlier in zip(self._counts(), before, strict=True))
        return Result(len(ended), refused, wrong, unequal, *counts)

    def close(self) -> None:
        """Ends the threads of grammars."""
        for made in (self._plain, *(made for _, made in self._trees)):
            made.grammars.close()

    def _counts(self) -> tuple[int, int, int]:
        stats = [made.stats() for _, made in self._trees]
        return (
            sum(each.preemptions for each in stats),
            sum(each.prefix_hit_tokens for each in stats),
            sum(each.forced_tokens for each in stats),
        )


def parts(model: str, kind: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """What is to be run: so many cases, the first with this seed, the next with the next."""
    most = MODELS[model][1]
    for number in range(-(-count // most)):
        yield {"model": model, "kind": kind, "seed": seed + number, "count": min(most, count - number * most)}


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.grammar.cases", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--kind", choices=["mixed", "json", "regex", "grammar"], default="json")
    parser.add_argument("--count", type=int, help=f"default: {', '.join(f'{name} {each[0]}' for name, each in MODELS.items())}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help=f"add a line per seed to {RECORD.name}, unless it is there")
    options = parser.parse_args()
    enable_compilation_cache()
    known = [json.loads(line) for line in RECORD.read_text().splitlines()] if options.record and RECORD.exists() else []
    bench = None
    for part in parts(options.model, options.kind, options.count or MODELS[options.model][0], options.seed):
        if any(part.items() <= line.items() for line in known):
            continue
        bench = bench or Bench(MORE_TREES, options.model)
        rng, started = random.Random(part["seed"]), time.perf_counter()
        result = bench.check([random_case(rng, options.kind, options.model) for _ in range(part["count"])])
        found = {name: len(value) if isinstance(value, list) else value for name, value in result._asdict().items()}
        versions = {name: importlib.metadata.version(name) for name in ("jax", "llguidance")}
        seconds = round(time.perf_counter() - started)
        line = json.dumps({"date": datetime.date.today().isoformat(), **versions, **part, **found, "seconds": seconds})
        print(line, flush=True)
        for case in [*result.wrong, *result.unequal, *result.refused][:5]:
            print(case, flush=True)
        if options.record:
            with RECORD.open("a") as file:
                file.write(line + "\n")
    if bench is not None:
        bench.close()


if __name__ == "__main__":
    main()
