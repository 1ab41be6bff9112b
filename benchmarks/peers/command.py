"""Against other engines: the same weights, prompts and machine, greedy, float32, batch 1, everybody in turn in one run.

Peers, each in a process of its own that waits while others run, and what has to be installed where it runs:
{peers}

transformers, OpenVINO GenAI, llama.cpp and vLLM also run with their prompt lookup (speculation without a second model);
transformers with --assistant also with its assisted generation. A peer that can run in several ways (attention, cache,
tokens looked up) is measured in the one that is fastest in a short trial. A peer that can't run is listed, with why.
`pip install 'jaxspec-llm[peers]'` brings what transformers, CTranslate2 and llama.cpp need. The others want packages that don't
go together with these, or another Python: name an environment for each.

Examples:
    python -m benchmarks.peers --tree 3/2/6
    python -m benchmarks.peers --torch-python ~/torch-env/bin/python     # torch in another environment
    python -m benchmarks.peers --peers transformers llama.cpp --peer-python llama.cpp=~/llama-env/bin/python
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from jaxspec.commands.common import listing
from jaxspec.commands.options import tree, whole
from jaxspec.commands.workbench import Workbench
from jaxspec.config import PLAIN
from jaxspec.defaults import BUILT_IN_TARGET

from .. import record
from ..options import BenchmarkError, BenchmarkParser, add_common_options, prompts_of
from .measure import TRANSFORMERS, Contender, measure, ours, summarize, theirs
from .process import KINDS, Kind, NotRun, Peer
from .tables import gain, tables

NAMES = tuple(kind.name for kind in KINDS)
TRIAL_TOKENS = 32
"""Per prompt, where a peer's ways are tried: enough for lookups to find something, and no longer than that."""


def peer_python(text: str) -> tuple[str, str]:
    """An option's type.

    In: "mlx-lm=~/mlx/bin/python"  Out: ("mlx-lm", "/home/me/mlx/bin/python")
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
        help="tokens that prompt lookup proposes; the fastest counts (default: 5 10)",
    )
    parser.add_argument("--assistant", type=Path, metavar="DIR", help="a smaller model, for transformers' assisted generation")
    parser.add_argument(
        "--threads", type=whole(1), default=os.cpu_count(), metavar="N", help="of each peer (default: the cores, %(default)s)"
    )
    parser.add_argument(
        "--torch-python", default=sys.executable, metavar="PYTHON", help="has torch and transformers (default: this Python)"
    )
    parser.add_argument(
        "--peer-python",
        type=peer_python,
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="the Python of another peer; once for each (default: this Python)",
    )
    options = parser.parse(arguments)
    if options.dtype not in ("auto", "float32"):
        parser.error(f"--dtype {options.dtype}: everybody runs in float32")
    options.dtype = "float32"  # on a GPU auto would be 16 bits, for us alone
    return options


class Peers:
    """The peers that run, and why the others don't."""

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
        """Raises BenchmarkError if nobody is left."""
        if self.not_run and not self.versions:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.not_run.items())
            raise BenchmarkError(f"there is nobody to compare with (see --peer-python): {reasons}")

    def contenders(self, prompts: Sequence[Sequence[int]], options: argparse.Namespace, context: int) -> list[Contender]:
        """Everybody's modes, each in its fastest way on two of the prompts."""
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
        assistant = str(options.assistant.resolve()) if options.assistant else None
        return peer.load(model=model, threads=options.threads, lookups=options.lookup, context=context, assistant=assistant)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0. Raises BenchmarkError if no peer can run."""
    options = parse(arguments)
    prompts = prompts_of(options)
    pythons = {TRANSFORMERS: options.torch_python, **dict(options.peer_python)}
    with ExitStack() as stack:
        peers = Peers([kind for kind in KINDS if kind.name in options.peers], pythons, stack)
        peers.check()
        bench = Workbench.of(options)
        encoded = bench.encode(prompts.prompts, chat=options.chat)
        context = bench.context_for(encoded, options.max_tokens)
        everybody = [ours(bench, spec, options.max_tokens) for spec in dict.fromkeys((PLAIN, options.tree))]
        everybody += peers.contenders(encoded, options, context)
        measured = measure(everybody, encoded, options.rounds)
    results = {
        **summarize(everybody, measured, options.max_tokens),
        "not_run": peers.not_run | measured.not_run,
        "versions": peers.versions,
    }
    print("\n\n".join(tables(results).values()))
    if options.tree != PLAIN:
        print(gain(results["contenders"]))
    record.write("peers", options, prompts, results)
    return 0
