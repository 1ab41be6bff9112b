"""Compares with other engines on a CPU: the same weights, prompts and machine, greedy, batch 1, all engines in turns.

Peers, each in a process of its own that is stopped while the others run, and their packages:
{peers}

We run plainly, with the head, with n-gram drafts, with both, and with a choice among these in every cycle; transformers, OpenVINO
GenAI and llama.cpp also run with prompt lookup, their name for n-gram drafts. Prompts that state their kind (.jsonl) have a
table by kind. A peer that can run in several ways (attention backend, tokens looked up) is measured in the one that is fastest in
a short trial. A peer that cannot run is listed with the reason. `pip install 'jaxspec-llm[peers]'` installs what transformers,
CTranslate2 and llama.cpp need. The others need packages that conflict with these: name another Python for them.

--precision names the precisions of the weights; all engines run in each. int8 and int4 are --quantization for our engine, which
also keeps the blocks of the GGUF file that llama.cpp gets: the model's own, or one that is written (Q8_0, Q4_0).

Examples:
    jaxspec bench peers --tree 3/1/4
    jaxspec bench peers --model-path smollm2 --prompts chat --tree 3/1/4 --precision float32 bfloat16 int8 int4
    jaxspec bench peers --peer-python transformers=~/torch-env/bin/python --peer-python openvino-genai=~/ov/bin/python
    jaxspec bench peers --peers transformers llama.cpp
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tqdm import tqdm

from jaxspec import SamplingParams
from jaxspec.checkpoints.hub import HubOptions
from jaxspec.commands.common import listing
from jaxspec.commands.options import tree, whole
from jaxspec.commands.workbench import CompilationCounter, Workbench, count_equal, run
from jaxspec.config import EngineConfig
from jaxspec.engine.trees import with_deeper_text
from jaxspec.load import ModelFiles, find_files
from jaxspec.tree_shape import NGRAM_TREE, PLAIN, TreeShape

from . import record
from .options import BenchmarkError, BenchmarkParser, add_common_options, exit_on_error, prompts_of
from .peer_models import GGUF_TYPES, Models, Weights
from .peer_process import KINDS, Kind, NotRun, Peer, Timed
from .peer_tables import OURS, TRANSFORMERS, tables
from .record import Spread, shares
from .side_by_side import alternate, check_nothing_compiled

NAMES = tuple(kind.name for kind in KINDS)
DRAFTS = ("head", "both", "deeper", "adaptive", "ngram")
TRIAL_TOKENS = 32
"""Per prompt in the trial of a peer's ways: enough for lookups to find something."""
Runs = dict[str, list[list[Timed]]]
"""By the contender's name, round and prompt."""


class Contender(NamedTuple):
    """One engine with or without speculation, with weights in one precision."""

    engine: str
    mode: str
    """Empty for a peer's plain decoding."""
    precision: str
    weights: str
    """Their format: the precision, or the type of a GGUF file."""
    way: str
    """The engine's fastest way to do this."""
    generate: Callable[[Sequence[Sequence[int]]], Timed]
    """Runs some prompts once, in sequence."""

    @property
    def name(self) -> str:
        mode = f", {self.mode}" if self.mode and self.engine != OURS else f" {self.mode}".rstrip()
        return f"{self.engine}{mode}, {self.weights}"


class Drafts(NamedTuple):
    """What our engine drafts with."""

    tree: TreeShape
    head: bool = True
    ngram: bool = False
    adaptive: bool = False

    def __str__(self) -> str:
        if self.tree == PLAIN:
            return "plain"
        sources = " and ".join(["head"] * self.head + ["n-grams"] * self.ngram) if self.ngram else ""
        return ", ".join(filter(None, [str(self.tree), sources, "adaptive" * self.adaptive]))


def ours(bench: Workbench, drafts: Drafts, weights: Weights, context: int, max_tokens: int) -> Contender:
    """Our engine with these drafts; it compiles on its first pass."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    engine = bench.engine(drafts.tree, 1, context, head=drafts.head, ngram=drafts.ngram, adaptive=drafts.adaptive)
    if drafts.adaptive:  # it would compile trees when it tries them
        engine.warm_up()

    def generate(prompts: Sequence[Sequence[int]]) -> Timed:
        result = run(engine, prompts, [params] * len(prompts))
        return result.seconds, [list(tokens) for tokens in result.tokens]

    return Contender(OURS, str(drafts), weights.precision, weights.name, "", generate)


def measure(contenders: Sequence[Contender], prompts: Sequence[Sequence[int]], rounds: int) -> tuple[Runs, dict[str, str]]:
    """Rounds of every contender, after an untimed one; and of those that did not run to the end the reason.

    Each prompt runs through all engines before the next, so that a machine that changes its speed slows all alike. A contender that
    fails is dropped; the others continue.
    """
    running = {each.name: each for each in contenders}
    not_run: dict[str, str] = {}

    def run_round() -> dict[str, list[Timed]]:
        runs: dict[str, list[Timed]] = {name: [] for name in running}
        for number, name in alternate(list(running), len(prompts)):
            bar.set_postfix_str(name)
            if name in running:
                try:
                    runs[name].append(running[name].generate([prompts[number]]))
                except NotRun as error:
                    del running[name]
                    not_run[name] = str(error)
            bar.update()
        return {name: runs[name] for name in running}

    with tqdm(total=len(running) * len(prompts), desc="untimed round", unit="run") as bar:
        run_round()
    counter = CompilationCounter()
    with tqdm(total=rounds * len(running) * len(prompts), desc="timed", unit="run") as bar:
        done = [run_round() for _ in range(rounds)]
    check_nothing_compiled(counter, before=0)
    return {name: [each[name] for each in done] for name in running}, not_run


def summarize(contenders: Sequence[Contender], runs: Runs, max_tokens: int, kinds: Sequence[str] = ()) -> dict:
    """Speeds, and ratios to the baseline within each round, for JSON. The baseline is transformers, or else our plain decoding, in
    the first precision. The first contender of a precision must be our plain decoding. `kinds`: of the prompts, if they have some.
    """

    def joined(of_prompts: Sequence[Timed]) -> Timed:
        return sum(seconds for seconds, _ in of_prompts), [tokens for _, several in of_prompts for tokens in several]

    rounds = {name: list(map(joined, each)) for name, each in runs.items()}
    baseline = next((each.name for each in contenders if each.engine == TRANSFORMERS and each.name in rounds), contenders[0].name)
    return {
        "baseline": baseline,
        "contenders": [
            describe(each, reference_of(each, contenders).name, rounds, rounds[baseline], max_tokens)
            | ({"by_kind": by_kind(kinds, runs[each.name], max_tokens)} if kinds else {})
            for each in contenders
            if each.name in rounds
        ],
    }


def by_kind(kinds: Sequence[str], rounds: Sequence[Sequence[Timed]], max_tokens: int) -> dict[str, dict]:
    """Tokens per second with the prompts of each kind."""

    def speed(kind: str, runs: Sequence[Timed]) -> float:
        return max_tokens * kinds.count(kind) / sum(seconds for own, (seconds, _) in zip(kinds, runs, strict=True) if own == kind)

    return {kind: Spread([speed(kind, runs) for runs in rounds]).describe() for kind in dict.fromkeys(kinds)}


def reference_of(contender: Contender, contenders: Sequence[Contender]) -> Contender:
    """Our plain decoding with the same weights, or else at the same precision: the contender's tokens are compared with its."""
    plain = [each for each in contenders if (each.engine, each.mode, each.precision) == (OURS, "plain", contender.precision)]
    return next((each for each in plain if each.weights == contender.weights), plain[0])


def describe(
    contender: Contender, reference: str, rounds: dict[str, list[Timed]], baseline: Sequence[Timed], max_tokens: int
) -> dict:
    """One contender, for JSON. Its tokens are those of its worst round."""
    own, expected = rounds[contender.name], rounds[reference][0][1]
    worst = min((tokens for _, tokens in own), key=lambda tokens: count_equal(tokens, expected))
    return {
        "name": contender.name,
        **{key: value for key, value in contender._asdict().items() if key != "generate"},
        "seconds": [seconds for seconds, _ in own],
        "tokens_per_second": Spread([sum(map(len, tokens)) / seconds for seconds, tokens in own]).describe(),
        "ratio_to_baseline": Spread(shares([each[0] for each in baseline], [each[0] for each in own])).describe(),
        "reference": reference,
        "equal_to_reference": count_equal(worst, expected),
        "prompts": len(worst),
        "tokens": sum(map(len, worst)),
        "tokens_asked": max_tokens * len(worst),
    }


def peer_python(text: str) -> tuple[str, str]:
    """An option's type.

    In: "llama.cpp=~/env/bin/python"  Out: ("llama.cpp", "/home/me/env/bin/python")
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
    about = "ours: of the head, both, both with deeper n-grams, the fastest in every cycle, n-grams alone (default: all)"
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, help=about)
    about = "of the weights (default: %(default)s)"
    parser.add_argument("--precision", nargs="+", choices=tuple(GGUF_TYPES), default=["float32"], help=about)
    parser.add_argument("--peers", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help="only these (default: all)")
    about = "tokens that prompt lookup proposes; the fastest is measured (default: 5 10)"
    parser.add_argument("--lookup", type=whole(1), nargs="+", default=[5, 10], metavar="N", help=about)
    about = "threads of each peer (default: %(default)s)"
    parser.add_argument("--threads", type=whole(1), default=os.cpu_count(), metavar="N", help=about)
    how: dict[str, Any] = {"type": peer_python, "metavar": "NAME=PYTHON", "action": "append", "default": []}
    parser.add_argument("--peer-python", help="the Python of a peer; repeat for each (default: this Python)", **how)
    options = parser.parse(arguments)
    options.precision = list(dict.fromkeys(options.precision))
    for name in ("dtype", "quantization", "speculative_draft_model_quantization"):
        if vars(options)[name] not in (None, "auto"):
            parser.error(f"--{name.replace('_', '-')}: leave it out, --precision names what all engines run in")
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

    def contenders(
        self, prompts: Sequence[Sequence[int]], options: argparse.Namespace, models: Models, context: int
    ) -> list[Contender]:
        """All modes of all peers in every precision, each in the way that is fastest on two of the prompts."""
        found = []
        for precision, peer in (bar := tqdm([*product(options.precision, self.running)], desc="loading peers", unit="model")):
            bar.set_postfix_str(f"{peer.kind.name}, {precision}")
            try:
                weights, path = models.gguf(precision)[:2] if peer.kind.takes_gguf else (precision, models.hugging_face)
                how = {"threads": options.threads, "lookups": options.lookup, "context": context}
                modes = peer.load(model=str(path.resolve()), precision=precision, **how)
            except NotRun as error:
                self.not_run[f"{peer.kind.name}, {precision}"] = str(error)
                continue
            for mode, ways in modes.items():
                what: dict[str, Any] = {"precision": precision, "contender": mode}
                try:
                    way = peer.fastest(ways, prompts[:2], max_tokens=min(options.max_tokens, TRIAL_TOKENS), **what)
                    generate = partial(peer.generate, max_tokens=options.max_tokens, way=way, **what)
                    found.append(Contender(peer.kind.name, mode if mode != "plain" else "", precision, weights, way, generate))
                except NotRun as error:
                    self.not_run[f"{peer.kind.name}, {mode}, {precision}"] = str(error)
        self.versions = {name: known for name, known in self.versions.items() if name in {each.engine for each in found}}
        self.check()
        return found


def benches(models: Models, files: ModelFiles, precisions: Sequence[str], not_run: dict[str, str]) -> dict[Weights, Workbench]:
    """Our models, at least one for each precision; what is missing goes to `not_run`."""
    found = {}
    for precision in precisions:
        try:
            for each in models.ours(precision):
                how = {"token_map": files.token_map, "dtype": each.dtype, "quantization": each.quantization}
                found[each] = Workbench(each.model, files.head, **how)
        except NotRun as error:
            not_run[f"{OURS}, {GGUF_TYPES[precision]}"] = str(error)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0. Raises BenchmarkError if no peer can run."""
    options = parse(arguments)
    prompts = prompts_of(options)
    hub = HubOptions(options.revision, options.download_dir, options.speculative_draft_model_revision)
    draft, token_map = options.speculative_draft_model_path, options.speculative_token_map
    with ExitStack() as stack:
        peers = Peers([kind for kind in KINDS if kind.name in options.peers], dict(options.peer_python), stack)
        peers.check()
        files = find_files(options.model_path, draft, None, token_map, EngineConfig(), hub)
        models = Models(files.target, Path(stack.enter_context(TemporaryDirectory())))
        found = benches(models, files, options.precision, peers.not_run)
        bench = next(iter(found.values()))
        prompts = bench.ask(prompts, options.max_tokens)
        encoded = bench.encode(prompts.prompts, chat=options.chat)
        context = bench.context_for(encoded, options.max_tokens)
        ways = {
            "head": Drafts(options.tree),
            "both": Drafts(options.tree, ngram=True),
            "deeper": Drafts(with_deeper_text(options.tree), ngram=True),
            "adaptive": Drafts(options.tree, ngram=True, adaptive=True),
            "ngram": Drafts(NGRAM_TREE, head=False, ngram=True),
        }
        asked = options.drafts or (DRAFTS if bench.models.head is not None else ("ngram",))
        drafts = dict.fromkeys([Drafts(PLAIN), *(ways[name] for name in asked)])  # a deep tree is its own deeper one
        contenders = [ours(found[weights], each, weights, context, options.max_tokens) for weights, each in product(found, drafts)]
        contenders += peers.contenders(encoded, options, models, context)
        contenders.sort(key=lambda each: options.precision.index(each.precision))
        runs, failed = measure(contenders, encoded, options.rounds)
    results = {
        **summarize(contenders, runs, options.max_tokens, prompts.kinds or ()),
        "not_run": peers.not_run | failed,
        "versions": peers.versions,
    }
    print("\n\n".join(tables(results).values()))
    record.write("peers", options, prompts, results)
    return 0


if __name__ == "__main__":
    exit_on_error("peers", main)
