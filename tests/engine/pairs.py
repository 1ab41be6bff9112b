"""Every feature with every other: which pairs and triples of features were served as plain decoding serves them.

python -m tests.engine.pairs serves groups of sources.py until a recorded group has each pair; --triples 3000 --seed 1 draws so many
triples and serves what they lack. Both add lines to sources.jsonl, and may be ended and started again. --table prints the table of
docs/pairs.md.
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import jax

from jaxspec.checkpoints.draft_models import refuse_token_map
from jaxspec.checkpoints.storing import Storing, config_stored_as
from jaxspec.config import FP8, EngineConfig
from jaxspec.decoding.drafter import Drafter, Merged, NoDrafter
from jaxspec.decoding.head_drafter import HeadDrafter
from jaxspec.engine.engine import check_trees
from jaxspec.engine.hosts import Hosts
from jaxspec.engine.models import drafter_of
from jaxspec.engine.program_cache import enable_compilation_cache
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import engine_target, random_block, random_head
from jaxspec.tree_shape import TreeShape
from tests.engine.records import recorded
from tests.engine.sources import PLACEMENTS, SOURCES, STORAGES, recorded_group

RECORD = Path(__file__).with_name("sources.jsonl")
COUNT = 16
"""Requests of a group that is served for what it has."""
DIMENSIONS = {
    "storage": tuple(dict.fromkeys(feature for feature, _ in STORAGES.values() if feature)),
    "cache": ("8-bit cache",),
    "source": tuple(sorted({source.kind for source in SOURCES.values()} - {"none"}, key=str.lower)) + ("none",),
    "placement": PLACEMENTS,
    "constraint": ("no constraint", "penalties", "grammar", "tools"),
    "loop": ("overlapped", "serial"),
    "prefix cache": ("prefix cache",),
    "preemption": ("preemption",),
}
"""Of the values of one, an engine or a request has one; but a request may have several constraints."""
DIMENSION_OF = {feature: name for name, values in DIMENSIONS.items() for feature in values}
OF_ENGINES = ("storage", "cache", "source", "placement", "loop")
"""The others are a request's."""


def go_together(features: Iterable[str]) -> bool:
    """Whether these may be features of one request."""
    places = [DIMENSION_OF[each] for each in features if each not in DIMENSIONS["constraint"][1:]]
    return len(set(places)) == len(places) and not ("no constraint" in features and set(features) & {*DIMENSIONS["constraint"][1:]})


def sets_of(size: int) -> list[frozenset[str]]:
    """All pairs or triples of features that go together."""
    return [frozenset(each) for each in combinations(DIMENSION_OF, size) if go_together(each)]


def served(lines: Iterable[Mapping[str, Any]], size: int) -> dict[frozenset[str], int]:
    """The pairs or triples that a request of an equal group had, and the number of such groups."""
    found: dict[frozenset[str], int] = {}
    for line in lines:
        features, counts = line.get("features", ()), line["counts"]
        if not features or counts.get("unequal") or not (counts.get("drafted") or "none" in features):
            continue
        for each in {frozenset(own) for has in line["has"] for own in combinations(sorted({*features, *has}), size)}:
            found[each] = found.get(each, 0) + 1
    return found


def random_triples(seed: int, count: int) -> list[frozenset[str]]:
    return random.Random(f"triples {seed}").choices(sets_of(3), k=count)


def wanted_for(missing: set[frozenset[str]], rng: random.Random) -> frozenset[str]:
    """The features of the engine, of some drawn at random, that serves one of the missing sets and the most others."""
    first = rng.choice(sorted(missing, key=sorted))
    drawn = [frozenset({*first, *DIMENSIONS["prefix cache"], *DIMENSIONS["preemption"]} | _others(first, rng)) for _ in range(300)]
    constraints = frozenset(DIMENSIONS["constraint"])
    return max(drawn, key=lambda each: sum(one <= each | constraints for one in missing)) - constraints


def _others(first: frozenset[str], rng: random.Random) -> set[str]:
    left = [name for name in OF_ENGINES if not first & {*DIMENSIONS[name]}]
    return {rng.choice(DIMENSIONS[name]) for name in left if name != "cache" or rng.random() < 0.5}


def serve_missing(needed: Iterable[frozenset[str]], size: int, seed: int, most: int, out: Path) -> int:
    """Serves and records groups until each of these sets was served, or so many groups were. Returns how many are missing.

    Several processes may do this at once, each with a seed of its own."""
    needed = set(needed)
    for _ in range(most):
        lines = recorded(out)
        missing = needed - served(lines, size).keys()
        if not missing:
            break
        number = sum(line["seed"] == seed for line in lines)
        wanted = wanted_for(missing, random.Random(f"{seed} {number}"))
        print(f"{len(missing)} of {len(needed)} are missing; now {', '.join(sorted(wanted))}", flush=True)
        recorded_group(number, seed, COUNT, wanted, out)
    return len(needed - served(recorded(out), size).keys())


REFUSED: dict[tuple[str, str], tuple[Callable[[], object], str]] = {
    ("two grammars", "in one request"): (
        lambda: SamplingParams(regex="a", choice=["a"]),
        "regex and choice can't be given together: a text follows one grammar",
    ),
    ("a quantised checkpoint", "`--quantization` to another kind"): (
        lambda: config_stored_as(STORAGES["int8"][1](engine_target(hidden_size=64)), Storing.ROWS, "fp8"),
        "the checkpoint is quantised already: leave out quantization, which is fp8",
    ),
    ("none", "a tree"): (lambda: check_tree(NoDrafter(), "3/2/5"), "speculation with the tree 3/2/5 needs a draft head"),
    ("block head", "`draft_window_size`"): (
        lambda: drafter_of(random_block(engine_target().config), EngineConfig(draft_window_size=8)),
        "draft_window_size is not supported for a DFLASH head: its config has its windows",
    ),
    ("draft model", "a token map"): (
        lambda: refuse_token_map(Path("model"), Path("map")),
        "the token map map is for heads, and model is a whole model with its own output",
    ),
    ("two heads", "of different layers"): (
        lambda: Merged(tuple(HeadDrafter.of(random_head(engine_target(num_layers=layers).config)) for layers in (7, 8))),
        "merged drafters must read the same layers of the target",
    ),
    ("`head_steps`", "a head alone"): (
        lambda: check_tree(HeadDrafter.of(random_head(engine_target().config)), "5/2/8/1"),
        "limits a head beside n-gram drafts, and this engine has not both",
    ),
    ("8-bit cache", "`mosaic` attention"): (
        lambda: EngineConfig(kv_cache_dtype=FP8, attention_kernel="mosaic"),
        "attention_kernel='mosaic' can't read a cache of 8 bits",
    ),
    ("two processes", "`--dp-size`"): (
        lambda: Hosts(2, 0, "host:1").check_devices(4, 2),
        "--dp-size 2 starts servers on one host: leave it out, or --nnodes 2",
    ),
}
"""What can't be together, how it is asked for, and the words that refuse it."""


def check_tree(drafter: Drafter, tree: str) -> None:
    """Whether the drafter can draft it."""
    check_trees(TreeShape.of(tree), EngineConfig(), drafter)


def as_markdown(lines: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The tables of docs/pairs.md: a sign for each pair, and what is refused."""
    pairs, names = served(lines, 2), list(DIMENSION_OF)
    width = max(map(len, names))
    yield "```text"
    yield f"{'':{width + 3}}" + "".join(chr(ord("a") + place) for place in range(len(names)))
    for place, name in enumerate(names):
        signs = [_sign(frozenset({name, other}), pairs) for other in names[: place + 1]]
        yield f"{chr(ord('a') + place)} {name:{width}} {''.join(signs)}"
    yield "```"
    yield ""
    yield "| together | refused with |"
    yield "|---|---|"
    for pair, (_, words) in REFUSED.items():
        yield f"| {', '.join(pair)} | {words} |"


def _sign(pair: frozenset[str], pairs: Mapping[frozenset[str], int]) -> str:
    if not go_together(pair) or len(pair) == 1:
        return "-"
    return "=" if pair in pairs else "?"


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.engine.pairs", description=__doc__)
    parser.add_argument("--triples", type=int, help="draw so many, instead of all pairs")
    parser.add_argument("--seed", type=int, default=1, help="of the triples")
    parser.add_argument("--groups-seed", type=int, default=1001, help="of the groups; several processes have different ones")
    parser.add_argument("--most", type=int, default=1000, help="groups to serve, at most")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--table", action="store_true", help="print the table and serve nothing")
    options = parser.parse_args()
    if options.table:
        print("\n".join(as_markdown(recorded(options.out))))
        return
    jax.config.update("jax_num_cpu_devices", 2)
    enable_compilation_cache()
    size = 2 if options.triples is None else 3
    needed = sets_of(2) if options.triples is None else random_triples(options.seed, options.triples)
    missing = serve_missing(needed, size, options.groups_seed, options.most, options.out)
    print(f"{len(needed)} drawn, {len(set(needed))} of them different: {missing} were not served")
    unequal = [line for line in recorded(options.out) if line["counts"].get("unequal")]
    print(f"{len(unequal)} groups differ from plain decoding")
    sys.exit(bool(unequal))


if __name__ == "__main__":
    main()
