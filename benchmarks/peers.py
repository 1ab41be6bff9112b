"""Against `transformers`: the same weights, prompts and machine, greedy, batch 1, everybody in turn in one run.

Contenders: our plain decoding, our tree, transformers' generate (torch, float32, the faster of its attention implementations,
torch's threads = cores) and its prompt lookup decoding. Its process waits while ours runs and the other way round.

Examples:
    python -m benchmarks.peers --tree 3/2/6
    python -m benchmarks.peers --torch-python ~/torch-env/bin/python     # torch in another environment
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from tqdm import tqdm

from benchmarks import record
from benchmarks.engines import BenchmarkError, Spread, alternate, check_nothing_compiled, exit_on_error
from benchmarks.options import BenchmarkParser, add_common_options
from jaxspec import SamplingParams
from jaxspec.commands.arguments import tree
from jaxspec.commands.prompts import load_prompts
from jaxspec.commands.workbench import CompilationCounter, Workbench, count_equal, run
from jaxspec.config import PLAIN
from jaxspec.llm import DEMO

INSTALL = "pip install 'jaxspec-llm[peers]', or name an interpreter that has torch and transformers with --torch-python"
ATTENTIONS = ("eager", "sdpa")


class MissingPackage(BenchmarkError):
    """The peer can't run before something is installed."""


class Peer:
    """The transformers process."""

    def __init__(self, python: str, model: Path, threads: int):
        script = Path(__file__).with_name("peer_transformers.py")
        self.process = subprocess.Popen([python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.model, self.threads = model, threads

    def load(self) -> dict:
        """Loads the model; returns versions."""
        return self.ask(op="load", model=str(self.model), threads=self.threads)

    def ask(self, **request) -> dict:
        """Sends a request and waits for the answer. Raises MissingPackage, or BenchmarkError with the process's own message."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise BenchmarkError(f"the transformers process ended with status {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise (MissingPackage if answer["missing"] else BenchmarkError)(answer["error"])
        return answer

    def fastest_attention(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> str:
        """The attention implementation that takes less time on these prompts, after an untimed pass of each."""
        seconds: dict[str, list[float]] = {name: [] for name in ATTENTIONS}
        for number, name in alternate(ATTENTIONS, 3):
            answer = self.ask(op="generate", prompts=prompts, max_tokens=max_tokens, attention=name, lookup=0)
            if number:
                seconds[name].append(answer["seconds"])
        return min(ATTENTIONS, key=lambda name: min(seconds[name]))

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


Timed = tuple[float, list[list[int]]]
"""The seconds that all prompts took, and their tokens."""
Contender = Callable[[], Timed]


def contenders(bench: Workbench, peer: Peer, prompts: Sequence[Sequence[int]], options: argparse.Namespace) -> dict[str, Contender]:
    """Everybody, by name; our plain decoding first."""
    params = [SamplingParams(max_tokens=options.max_tokens, temperature=0.0, ignore_eos=True)] * len(prompts)

    def ours(spec) -> Contender:
        engine = bench.engine(spec, 1)

        def generate() -> Timed:
            result = run(engine, prompts, params)
            return result.seconds, [list(tokens) for tokens in result.tokens]

        return generate

    attention = peer.fastest_attention(prompts[:2], options.max_tokens)

    def theirs(lookup: int) -> Contender:
        def generate() -> Timed:
            answer = peer.ask(op="generate", prompts=prompts, max_tokens=options.max_tokens, attention=attention, lookup=lookup)
            return answer["seconds"], answer["token_ids"]

        return generate

    return {
        "jaxspec plain": ours(PLAIN),
        f"jaxspec {options.tree}": ours(options.tree),
        f"transformers {attention}": theirs(0),
        f"transformers {attention}, prompt lookup": theirs(options.lookup),
    }


def measure(everybody: dict[str, Contender], rounds: int) -> dict[str, list[Timed]]:
    """Results of every contender, round by round, after an untimed pass."""
    for contender in (untimed := tqdm(everybody, desc="untimed pass", unit="contender")):
        untimed.set_postfix_str(contender)
        everybody[contender]()
    counter = CompilationCounter()
    results: dict[str, list[Timed]] = {name: [] for name in everybody}
    for _, name in (bar := tqdm(list(alternate(list(everybody), rounds)), desc="timed", unit="run")):
        bar.set_postfix_str(name)
        results[name].append(everybody[name]())
    check_nothing_compiled(counter, before=0)
    return results


def summarize(results: dict[str, list[Timed]]) -> list[dict]:
    """Speeds, and ratios to transformers' plain generate, round by round."""
    reference, baseline = next(iter(results)), list(results)[2]
    summary = []
    for name, rounds in results.items():
        ratios = [theirs[0] / each[0] for each, theirs in zip(rounds, results[baseline], strict=True)]
        tokens = rounds[0][1]
        summary.append(
            {
                "name": name,
                "tokens_per_second": Spread([sum(map(len, ids)) / seconds for seconds, ids in rounds]).describe(),
                "ratio_to_transformers": Spread(ratios).describe(),
                "equal_to_jaxspec_plain": count_equal(tokens, results[reference][0][1]),
                "prompts": len(tokens),
                "tokens": sum(map(len, tokens)),
            }
        )
    return summary


def show(summary: Sequence[dict]) -> str:
    """The summary as a table."""
    rows = [
        [
            each["name"],
            f"{each['tokens_per_second']['median']:.1f}",
            str(Spread(each["ratio_to_transformers"]["values"])),
            str(each["tokens"]),
            f"{each['equal_to_jaxspec_plain']}/{each['prompts']}",
        ]
        for each in summary
    ]
    return record.table(["", "tokens/s", "x transformers (min..max)", "tokens", "equal to jaxspec plain"], rows)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = BenchmarkParser("peers", __doc__)
    add_common_options(parser, num_prompts=8)
    parser.add_argument("--tree", type=tree, default=tree("3/2/6"), metavar="S/K/N", help="our tree (default: %(default)s)")
    parser.add_argument("--lookup", type=int, default=10, help="tokens that prompt lookup proposes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="timed runs of each contender (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch's threads (default: the cores, %(default)s)")
    parser.add_argument("--torch-python", default=sys.executable, help="a Python with torch and transformers (default: this one)")
    return parser.parse(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 if torch is missing."""
    options = parse(arguments)
    prompts = load_prompts(options.prompts, options.num_prompts, options.default_num_prompts)
    with Peer(options.torch_python, options.model_path or DEMO / "target", options.threads) as peer:
        try:
            versions = peer.load()
        except MissingPackage as error:
            print(f"error: {error}: {INSTALL}", file=sys.stderr)
            return 2
        bench = Workbench.of(options)
        summary = summarize(
            measure(contenders(bench, peer, bench.encode(prompts.prompts, chat=options.chat), options), options.rounds)
        )
    plain, speculative = (each["ratio_to_transformers"]["values"] for each in summary[:2])
    print(show(summary))
    gain = median(tree / none for tree, none in zip(speculative, plain, strict=True))
    print(f"plain is {Spread(plain)} x transformers; the tree {options.tree} is {gain:.2f} x plain", flush=True)
    record.write("peers", options, prompts, {"peer": versions, "contenders": summary})
    return 0


if __name__ == "__main__":
    exit_on_error(main)
