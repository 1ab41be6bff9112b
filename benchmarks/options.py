"""The command lines of the benchmarks: what they have in common, by the names that `jaxspec`'s other commands have for it."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from jaxspec.commands.common import PromptSet, load_prompts
from jaxspec.commands.options import Parser, add_model_options, add_prompt_options, whole
from jaxspec.sampling_params import SamplingParams

RESULTS = Path(__file__).parent / "results"


class BenchmarkParser(Parser):
    """A benchmark's options. What it parses remembers the command (for the record) and has `out`, the file of results."""

    def __init__(self, name: str, description: str | None, *, here: bool = False):
        """`here`: results go to the current directory, because what is measured is somebody else's."""
        super().__init__(f"jaxspec bench {name}", description or "")
        self.name = name.replace("-", "_")
        self._here = here
        where = "the current directory" if here else f"{show(RESULTS)}, of another model in the current directory"
        self.add_argument(
            "--out", type=Path, metavar="FILE", help=f"JSON lines: gets one more (default: {self.name}.jsonl in {where})"
        )

    def refuse_beside_trees(self, options: argparse.Namespace, others: Iterable[str]) -> None:
        """Ends the process if --trees was given with others, which would then have no effect. Their defaults must be None."""
        useless = [f"--{name.replace('_', '-')}" for name in others if vars(options)[name] is not None]
        if options.trees and useless:
            self.error(f"--trees names the trees: leave out {', '.join(useless)}")

    def parse(
        self, arguments: Sequence[str] | None, mode: Callable[[argparse.Namespace], str] = lambda options: ""
    ) -> argparse.Namespace:
        """Options of these arguments, or of the process's own. Ends the process if they are wrong.

        `mode`: what follows the benchmark's name in the name of its results, for results that are not to be mixed with others.
        """
        given = list(sys.argv[1:] if arguments is None else arguments)
        options = self.parse_args(given)
        if options.out is None:
            folder = Path() if self._here or vars(options).get("model_path") is not None else RESULTS
            options.out = folder / f"{self.name}{mode(options)}.jsonl"
        options.command = shlex.join(["python", "-m", f"benchmarks.{self.name}", *all_shortened(without_out(given))])
        options.load_average = os.getloadavg()[0]
        return options


def add_common_options(parser: BenchmarkParser, *, num_prompts: int, max_tokens: int = 128, rounds: int | None = None) -> None:
    """Model, head, prompts, and how often to measure."""
    add_model_options(parser)
    add_prompt_options(parser, num_prompts=num_prompts, max_tokens=max_tokens)
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=whole(1), default=rounds, metavar="N", help="timed runs of each (default: %(default)s)"
        )


def prompts_of(options: argparse.Namespace) -> PromptSet:
    """What the options of `add_common_options` name. Raises ValueError if it can't be had."""
    return load_prompts(options.prompts, options.num_prompts, options.default_num_prompts)


def add_sampling_options(parser: BenchmarkParser) -> None:
    """Greedy, unless a temperature is given."""
    parser.add_argument("--temperature", type=float, default=0.0, help="0, greedy, by default")
    parser.add_argument(
        "--seed", type=int, default=1000, metavar="N", help="of the first prompt, if sampled (default: %(default)s)"
    )


def sampling_params(options: argparse.Namespace, count: int) -> list[SamplingParams]:
    """Parameters of `count` prompts, all of the same length. Seeds are fixed: with and without speculation the text is the same."""
    params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, ignore_eos=True)
    return [params if options.temperature == 0 else replace(params, seed=options.seed + index) for index in range(count)]


def shortened(argument: str) -> str:
    """An argument without the place where its file lies on this machine, which tells nobody anything, and without a key.

    In: "--model-path=/home/me/model"  Out: "--model-path=model"
    """
    name, separator, value = argument.rpartition("=")
    if separator and name.endswith("key"):
        return f"{name}=***"
    return name + separator + (Path(value).name if value.startswith(("/", "~", "..")) else value)


def all_shortened(arguments: Sequence[str]) -> list[str]:
    """As `shortened`, and what follows an option for a key is left out too.

    In: ["--api-key", "secret", "/home/me/model"]  Out: ["--api-key", "***", "model"]
    """
    before = ("", *arguments)
    return [
        "***" if last.startswith("--") and last.endswith("key") else shortened(argument)
        for last, argument in zip(before, arguments, strict=False)
    ]


def without_out(arguments: Sequence[str]) -> list[str]:
    """The arguments but for --out and its file."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument != "--out" and not argument.startswith("--out="):
            kept.append(argument)
        skip = argument == "--out"
    return kept


def show(path: Path) -> str:
    """A path as one would type it here."""
    return os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)
