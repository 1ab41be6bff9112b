"""The command lines of the benchmarks: what they have in common, with the option names of `jaxspec`'s other commands."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from jaxspec.commands.collect_env import cores
from jaxspec.commands.common import PromptSet, add_prompt_options, in_flags, load_prompts, run_guarded
from jaxspec.commands.options import Parser, add_model_options, whole
from jaxspec.sampling_params import SamplingParams

IN_CLONE = __package__ == "benchmarks"
"""An installed package is called jaxspec.bench. Nothing may be written into it."""
RESULTS = Path(__file__).parent / "results" if IN_CLONE else Path()
"""Where results of the built-in model go by default."""
BUSY = 0.3
"""Load average per core above which a machine is too busy for absolute figures."""


class BenchmarkError(ValueError):
    """A benchmark cannot give figures. The message says why and what to do."""


class BenchmarkParser(Parser):
    """A benchmark's options. Parsing also sets `command` and `load_average` (for the record) and `out` (the file of results)."""

    def __init__(self, name: str, description: str | None, *, here: bool = False):
        """`here`: results go to the current directory by default, because the benchmark may measure another project's server."""
        super().__init__(f"jaxspec bench {name}", description or "")
        self.name = name
        self._folder = Path() if here else RESULTS
        shown = (
            "the current directory" if self._folder == Path() else f"{show(RESULTS)}; with --model-path in the current directory"
        )
        self.add_argument(
            "--out", type=Path, metavar="FILE", help=f"append the record to this file (default: {self.name}.jsonl in {shown})"
        )

    def parse(
        self, arguments: Sequence[str] | None, mode: Callable[[argparse.Namespace], str] = lambda options: ""
    ) -> argparse.Namespace:
        """Parses these arguments, or those of the process. Ends the process if they are wrong.

        `mode` returns a suffix for the default file name, so that results of different kinds are not mixed.
        """
        given = list(sys.argv[1:] if arguments is None else arguments)
        options = self.parse_args(given)
        if options.out is None:
            folder = Path() if vars(options).get("model_path") is not None else self._folder
            options.out = folder / f"{self.name}{mode(options)}.jsonl"
        if options.out.is_dir():
            self.error(f"--out must be a file, and {options.out} is a directory")
        start = ["python", "-m", f"benchmarks.{self.name}"] if IN_CLONE else ["jaxspec", "bench", self.name]
        options.command = shlex.join([*start, *all_shortened(without_out(given))])
        options.load_average = os.getloadavg()[0]
        if is_busy(options.load_average, cores() or 1):
            print(
                f"warning: the load average is {options.load_average:.1f} on {cores()} cores: absolute figures will be too low",
                file=sys.stderr,
            )
        return options


def is_busy(load_average: float, cores: int) -> bool:
    """Whether other work took enough of the machine to change the figures."""
    return load_average > BUSY * cores


def exit_on_error(name: str, main: Callable[[], int]) -> NoReturn:
    """Runs a benchmark and ends the process with its exit status."""
    raise SystemExit(run_guarded(f"jaxspec bench {name}", main, in_flags))


def add_common_options(parser: BenchmarkParser, *, num_prompts: int, max_tokens: int = 128, rounds: int | None = None) -> None:
    """Adds the options for the model, the head, the prompts and the number of rounds."""
    add_model_options(parser)
    add_prompt_options(parser, num_prompts=num_prompts, max_tokens=max_tokens)
    if rounds is not None:
        parser.add_argument("--rounds", type=whole(1), default=rounds, metavar="N", help="timed rounds (default: %(default)s)")


def prompts_of(options: argparse.Namespace) -> PromptSet:
    """The prompts that the options of `add_common_options` name. Raises ValueError if they cannot be read."""
    return load_prompts(options.prompts, options.num_prompts, options.default_num_prompts)


def add_sampling_options(parser: BenchmarkParser, *, several: bool = False) -> None:
    """`several`: more than one temperature may be given."""
    how: dict[str, Any] = {"default": [0.0], "nargs": "+", "metavar": "T"} if several else {"default": 0.0}
    parser.add_argument("--temperature", type=float, help="default: 0 (greedy)", **how)
    parser.add_argument(
        "--seed", type=int, default=1000, metavar="N", help="seed of the first prompt, if sampled (default: %(default)s)"
    )


def sampling_params(
    options: argparse.Namespace, count: int, temperature: float | None = None, *, ignore_eos: bool = True
) -> list[SamplingParams]:
    """Parameters of `count` prompts, with fixed seeds: speculation must not change any text.

    `temperature`: in place of the options' own, where they have several. `ignore_eos`: all texts have the same length.
    """
    temperature = options.temperature if temperature is None else temperature
    params = SamplingParams(max_tokens=options.max_tokens, temperature=temperature, ignore_eos=ignore_eos)
    return [params if temperature == 0 else replace(params, seed=options.seed + index) for index in range(count)]


def shortened(argument: str) -> str:
    """An argument without directories of this machine and without keys.

    In: "--model-path=/home/me/model"  Out: "--model-path=model"
    """
    name, separator, value = argument.rpartition("=")
    if separator and name.endswith("key"):
        return f"{name}=***"
    return name + separator + (Path(value).name if value.startswith(("/", "~", "..")) else value)


def all_shortened(arguments: Sequence[str]) -> list[str]:
    """As `shortened`; a key that follows its option is left out too.

    In: ["--api-key", "secret", "/home/me/model"]  Out: ["--api-key", "***", "model"]
    """
    before = ("", *arguments)
    return [
        "***" if last.startswith("--") and last.endswith("key") else shortened(argument)
        for last, argument in zip(before, arguments, strict=False)
    ]


def without_out(arguments: Sequence[str]) -> list[str]:
    """The arguments without --out and its file."""
    pairs = zip(("", *arguments), arguments, strict=False)
    return [each for last, each in pairs if "--out" not in (last, each) and not each.startswith("--out=")]


def show(path: Path) -> str:
    """A path, relative to the current directory if it lies below it."""
    return os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)
