"""How many more tokens a verification yields when what a grammar forces is drafted: ten schemas as programs send them.

python -m tests.grammar.forced --model smollm2 prints the tokens per verification of the same greedy requests with these drafts and
without. It counts, so a busy machine does not matter.
"""

import argparse
import json
from typing import Any, NamedTuple

from jaxspec.config import TreeShape
from jaxspec.engine.program_cache import enable_compilation_cache
from jaxspec.engine.request import GenerationRequest
from jaxspec.grammar.trees import TextTree
from jaxspec.sampling_params import SamplingParams
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


class Counts(NamedTuple):
    """Of one request."""

    tokens: int
    verifications: int
    output: list[int]


def counts_of(model: str, tree: TreeShape, temperature: float) -> dict[str, Counts]:
    """Of a request for each of the schemas."""
    made = engine(tree, model, num_pages=400, context_length=400)
    found = {}
    for name, schema in SCHEMAS.items():
        params = SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=1, json_schema=schema)
        request = made.add(GenerationRequest(prompt_of(model, name), params))
        while made.has_work:
            made.step()
        found[name] = Counts(len(request.output), request.speculation.verify_count, list(request.output))
    made.grammars.close()
    return found


def prompt_of(model: str, name: str) -> tuple[int, ...]:
    if model == "tiny":
        return tuple(f"{name}:".encode())
    of = loaded(model)
    text = f"<|im_start|>user\nWrite {name} as JSON.<|im_end|>\n<|im_start|>assistant\n" if model == "smollm2" else f"# {name}\n"
    return tuple(of.tokenizer.encode(text))


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.grammar.forced", description=__doc__)
    parser.add_argument("--model", choices=TREES, default="demo")
    parser.add_argument("--tree", type=TreeShape.of)
    parser.add_argument("--temperature", type=float, default=0)
    options = parser.parse_args()
    enable_compilation_cache()
    tree = options.tree or TREES[options.model]
    having = counts_of(options.model, tree, options.temperature)
    add_forced = TextTree.add_forced
    TextTree.add_forced = lambda *_: None
    lacking = counts_of(options.model, tree, options.temperature)
    TextTree.add_forced = add_forced
    for name, counts in having.items():
        print(f"{name:28} {counts.tokens:4} tokens, {rate([counts]):.2f} a verification, without {rate([lacking[name]]):.2f}")
    every, none = rate(list(having.values())), rate(list(lacking.values()))
    equal = all(having[name].output == lacking[name].output for name in having)
    found = {"model": options.model, "tree": str(tree), "with": round(every, 3), "without": round(none, 3), "equal": equal}
    print(json.dumps({**found, "ratio": round(every / none, 3)}))


def rate(counts: list[Counts]) -> float:
    """Tokens per verification."""
    return sum(each.tokens for each in counts) / sum(each.verifications for each in counts)


if __name__ == "__main__":
    main()
