"""What grammars bring and cost, measured with ten schemas as programs send them.

python -m tests.grammar.costs forced --model smollm2 prints the tokens per verification of the same greedy requests with drafts of
what a grammar forces and without. It counts, so a busy machine does not matter.
python -m tests.grammar.costs time --model smollm2 prints the time of a cycle of eight requests under grammars and of eight without,
and how fast a request without one runs beside three under grammars, or beside three with another tree. Needs a quiet machine.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from jaxspec.engine.engine import Engine
from jaxspec.engine.program_cache import enable_compilation_cache
from jaxspec.engine.request import GenerationRequest
from jaxspec.grammar.trees import TextTree
from jaxspec.sampling_params import SamplingParams
from jaxspec.server.structured import FIXED_LAYOUT
from jaxspec.tree_shape import TreeShape
from tests.engine.served import served, updates_of
from tests.grammar.cases import engine, loaded


def closed(**properties: Any) -> dict[str, Any]:
    """An object with these fields, all of them."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def listed(items: dict[str, Any], most: int = 3) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


TEXT, NUMBER, WHOLE, BOOLEAN = ({"type": name} for name in ("string", "number", "integer", "boolean"))
SHORT = {"type": "string", "maxLength": 30}
DATE = {"type": "string", "format": "date"}
POINT = closed(type={"const": "Point"}, coordinates={"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2})
SCHEMAS = {
    "a person": closed(first_name=SHORT, last_name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 120}, email=SHORT),
    "an invoice": closed(
        invoice_number=SHORT, date=DATE, customer=closed(name=SHORT, address=SHORT),
        items=listed(closed(description=SHORT, quantity=WHOLE, unit_price=NUMBER)), currency={"enum": ["EUR", "USD", "GBP"]},
    ),
    "a call of a tool": closed(
        name={"const": "get_weather"}, arguments=closed(location=SHORT, unit={"enum": ["celsius", "fahrenheit"]}, days=WHOLE)
    ),
    "a GeoJSON feature": closed(type={"const": "Feature"}, geometry=POINT, properties=closed(name=SHORT, population=WHOLE)),
    "a recipe": closed(title=SHORT, servings=WHOLE, ingredients=listed(closed(name=SHORT, amount=SHORT)), steps=listed(SHORT)),
    "a classification": closed(
        sentiment={"enum": ["positive", "neutral", "negative"]}, confidence={"enum": ["low", "medium", "high"]}, is_spam=BOOLEAN
    ),
    "a calendar event": closed(title=SHORT, start=DATE, end=DATE, attendees=listed(SHORT), is_all_day=BOOLEAN),
    "a product": closed(
        product_name=SHORT, price=closed(amount=NUMBER, currency={"enum": ["EUR", "USD"]}), in_stock=BOOLEAN, tags=listed(SHORT)
    ),
    "an answer with its sources": closed(
        reasoning={"type": "string", "maxLength": 80}, final_answer=SHORT, sources=listed(closed(title=SHORT, page=WHOLE), 2)
    ),
    "entities of a text": closed(entities=listed(closed(entity=SHORT, kind={"enum": ["person", "place", "organization"]}))),
}  # fmt: skip
TREES = {"tiny": TreeShape(3, 2, 6), "demo": TreeShape(5, 4, 16), "smollm2": TreeShape(3, 1)}
LENGTH = 200
SHORTEST = ("a classification", "a call of a tool")
"""They end before much can be timed."""


class Counts(NamedTuple):
    """Of one request."""

    tokens: int
    verifications: int
    output: list[int]


def counts_of(model: str, tree: TreeShape, temperature: float, layout: Mapping[str, Any]) -> dict[str, Counts]:
    """Of a request for each of the schemas."""
    made = engine(tree, model, num_pages=400, context_length=400)
    found = {}
    for name, schema in SCHEMAS.items():
        params = SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=1, json_schema={**layout, **schema})
        (request,) = served(made, GenerationRequest(prompt_of(model, name), params))
        found[name] = Counts(len(request.output), request.speculation.verify_count, list(request.output))
    made.grammars.close()
    return found


def prompt_of(model: str, name: str) -> tuple[int, ...]:
    if model == "tiny":
        return tuple(f"{name}:".encode())
    of = loaded(model)
    text = f"<|im_start|>user\nWrite {name} as JSON.<|im_end|>\n<|im_start|>assistant\n" if model == "smollm2" else f"# {name}\n"
    return tuple(of.tokenizer.encode(text))


def forced(options: argparse.Namespace) -> None:
    """Prints the table of each schema, and a line of JSON."""
    tree = options.tree or TREES[options.model]
    asked = options.model, tree, options.temperature, FIXED_LAYOUT if options.fixed_layout else {}
    having = counts_of(*asked)
    add_forced = TextTree.add_forced
    TextTree.add_forced = lambda *_: None
    lacking = counts_of(*asked)
    TextTree.add_forced = add_forced
    for name, counts in having.items():
        print(f"{name:28} {counts.tokens:4} tokens, {rate([counts]):.2f} a verification, without {rate([lacking[name]]):.2f}")
    every, none = rate(list(having.values())), rate(list(lacking.values()))
    equal = all(having[name].output == lacking[name].output for name in having)
    found = {
        "model": options.model, "tree": str(tree), "fixed layout": options.fixed_layout, "with": round(every, 3),
        "without": round(none, 3), "equal": equal, "tokens": sum(each.tokens for each in having.values()),
        "verifications": sum(each.verifications for each in having.values()),
    }  # fmt: skip
    print(json.dumps({**found, "ratio": round(every / none, 3)}))


def rate(counts: list[Counts]) -> float:
    """Tokens per verification."""
    return sum(each.tokens for each in counts) / sum(each.verifications for each in counts)


class Pace(NamedTuple):
    """Of the first of some requests, while all of them run."""

    seconds: float
    """Per verification."""
    mask_seconds: float
    """Of these, for all masks."""
    speed: float
    """Tokens per second."""


def pace_of(made: Engine, asked: Sequence[GenerationRequest]) -> Pace:
    """From when all have a token until one ends; then they are aborted."""
    requests = [made.add(each) for each in asked]

    def state() -> tuple[float, float, int, int]:
        first = requests[0]
        return time.perf_counter(), made.stats().mask_seconds, first.speculation.verify_count, len(first.output)

    while not all(each.output for each in requests):
        made.step()
    before = after = state()
    while all(each.finish_reason is None for each in requests):
        after = state()
        made.step()
    for each in requests:
        made.abort(each.id)
    updates_of(made)
    seconds, masks, verifications, tokens = (end - begin for begin, end in zip(before, after, strict=True))
    return Pace(seconds / verifications, masks / verifications, tokens / seconds)


def timed(options: argparse.Namespace) -> None:
    """Prints a line per side and a line of JSON; the sides take turns."""
    tree = options.tree or TREES[options.model]
    other = TreeShape(tree.num_steps, tree.topk + 1, tree.num_draft_tokens)
    made = engine(tree, options.model, all_sizes=True, num_pages=1600, context_length=400, request_trees=(other,))
    of = [(prompt_of(options.model, name), schema) for name, schema in SCHEMAS.items() if name not in SHORTEST]
    free = [GenerationRequest(prompt, SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)) for prompt, _ in of]
    bound = [
        GenerationRequest(prompt, SamplingParams(max_tokens=LENGTH, temperature=0, json_schema=schema)) for prompt, schema in of
    ]
    sides = {
        "eight under grammars": bound,
        "eight without": free,
        "one beside three under grammars": [free[0], *bound[1:4]],
        "one beside three with another tree": [free[0], *(replace(each, tree=other) for each in free[1:4])],
    }
    found = {name: list[Pace]() for name in sides}
    for number in range(options.rounds + 1):
        for name, asked in sides.items():
            pace = pace_of(made, asked)
            if number:  # the first round compiles
                found[name].append(pace)
    made.grammars.close()
    medians = {name: Pace(*map(median, zip(*paces, strict=True))) for name, paces in found.items()}
    for name, pace in medians.items():
        print(f"{name:34} {1000 * pace.seconds:.2f} ms a cycle, masks {1000 * pace.mask_seconds:.2f}, {pace.speed:.1f} tokens/s")
    grammars, without, beside, other = medians.values()
    shares = {"grammars": grammars.seconds / without.seconds, "masks": grammars.mask_seconds / grammars.seconds,
              "beside, cycle": beside.seconds / other.seconds, "beside, tokens/s": beside.speed / other.speed}  # fmt: skip
    print(json.dumps({"model": options.model, "tree": str(tree), **{name: round(share, 3) for name, share in shares.items()}}))


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.grammar.costs", description=__doc__)
    parser.add_argument("what", choices=["forced", "time"])
    parser.add_argument("--model", choices=TREES, default="demo")
    parser.add_argument("--tree", type=TreeShape.of)
    parser.add_argument("--temperature", type=float, default=0, help="of forced")
    parser.add_argument("--fixed-layout", action="store_true", help="of forced: JSON on one line (disable_any_whitespace)")
    parser.add_argument("--rounds", type=int, default=5, help="of time")
    options = parser.parse_args()
    enable_compilation_cache()
    (forced if options.what == "forced" else timed)(options)


if __name__ == "__main__":
    main()
