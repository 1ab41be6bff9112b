"""jaxspec generate: completes one prompt on the terminal and colours every token by its origin."""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.checkpoints.json_files import read_object
from jaxspec.commands.common import in_flags, run_guarded
from jaxspec.commands.options import ENGINE, Parser, add_model_options, add_tree_options, chosen_tree, help_of
from jaxspec.defaults import check_name
from jaxspec.engine.output import BONUS, DRAFT, PLAIN, PREFILL, traced_tokens
from jaxspec.engine.request import GenerationOutput, GenerationRequest
from jaxspec.sampling_params import Flag, Number, SamplingParams, StringList, declaration

if TYPE_CHECKING:
    from jaxspec.engine.engine import Engine

COLOURS = {DRAFT: "\033[32m", BONUS: "\033[33m", PLAIN: "", PREFILL: ""}
RESET = "\033[0m"
LEGEND = f"{COLOURS[DRAFT]}accepted draft{RESET}  {COLOURS[BONUS]}bonus{RESET}  plain"
"""What the colours mean."""
CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}")
"""Replaces control characters that a model may write and the terminal would obey; tabs and line ends stay."""
EXAMPLES = """examples:
  jaxspec generate "def fibonacci(n):"
  jaxspec generate - --max-tokens 64 < prompt.txt
  jaxspec generate "A person as JSON: " --json-schema person.json
  jaxspec generate --chat "Why is the sky blue?" --model-path Llama-3.1-8B-Instruct --draft EAGLE3-LLaMA3.1-Instruct-8B"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked as far as possible without the model."""
    description = "Complete one prompt; the text goes to stdout, statistics to stderr."
    parser = Parser("jaxspec generate", description, EXAMPLES, usage="jaxspec generate PROMPT [options]")
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from stdin")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template, as a user's message")
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="colour tokens by their origin; auto: on a terminal (default: %(default)s)",
    )
    add_sampling_options(parser)
    add_model_options(parser, "context_length", *ENGINE)
    add_tree_options(parser)
    return parser.parse_args(argv)


def add_sampling_options(parser: Parser) -> None:
    """The parameters of SamplingParams that are declared with an option; greedy by default."""
    group = parser.add_argument_group("sampling")
    for field in fields(SamplingParams):
        check, metavar = declaration(field.name).check, declaration(field.name).cli
        if metavar is None:
            continue
        default = 0.0 if field.name == "temperature" else field.default
        settings: dict[str, Any] = {"default": default, "metavar": metavar, "type": float if isinstance(check, Number) else int}
        if isinstance(check, Flag):
            settings = {"action": "store_true"}
        elif isinstance(check, StringList):
            settings = {"action": "append", "default": [], "metavar": metavar}
        about = help_of(SamplingParams, field.name, default).replace("%", "%%")
        group.add_argument(f"--{field.name.replace('_', '-')}", help=about, **settings)
    group.add_argument(
        "--json-schema", type=Path, metavar="FILE", help="the text is JSON that this schema allows (default: any text)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if the engine failed; 2 if the command line or a file is wrong."""
    options = parse(argv)
    return run_guarded("jaxspec generate", lambda: run(options), in_flags)


def run(options: argparse.Namespace) -> int:
    """Loads, compiles, streams. Raises ValueError or OSError for errors that the user can fix."""
    tree = chosen_tree(options)
    given = vars(options) | {"json_schema": None if options.json_schema is None else read_object(options.json_schema)}
    params = SamplingParams(**{field.name: given[field.name] for field in fields(SamplingParams) if field.name in given})
    check_name(options.model_path)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt

    from jaxspec.commands.workbench import CompilationCounter, Workbench

    bench = Workbench.of(options, tree=tree, progress=sys.stderr.isatty())
    (tokens,) = bench.encode([prompt], chat=options.chat)
    compile_ahead(bench.models.engine, tokens, params)
    counter = CompilationCounter()
    coloured = options.color == "always" or (options.color == "auto" and sys.stdout.isatty())
    started = time.perf_counter()
    output = stream(bench.models.engine, GenerationRequest(tuple(tokens), params, wants_trees=coloured))
    seconds = time.perf_counter() - started
    print(flush=True)
    if output.error:
        print(f"jaxspec generate: error: {output.error}", file=sys.stderr)
        return 1
    if coloured:
        print(f"\n{LEGEND}", file=sys.stderr)
    print(summary(output, seconds, compiled=counter.count > 0), file=sys.stderr)
    return 0


def compile_ahead(engine: "Engine", tokens: Sequence[int], params: SamplingParams) -> None:
    """Runs a throwaway request, which compiles the programs that the prompt needs, so that compilation is not timed."""
    if sys.stderr.isatty():
        print("compiling ...", end="", file=sys.stderr, flush=True)
    short = SamplingParams(max_tokens=min(2, params.max_tokens), temperature=0.0, ignore_eos=True, json_schema=params.json_schema)
    engine.add(GenerationRequest(tuple(tokens), short))
    while engine.has_work:
        engine.step()
    engine.flush_cache()
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def stream(engine: "Engine", asked: GenerationRequest) -> GenerationOutput:
    """Prints the text as it arrives; returns the output."""
    request, unsafe = engine.add(asked), CONTROL if sys.stdout.isatty() else {}
    while engine.has_work:
        for update in engine.step():
            text = update.text.translate(unsafe)
            if asked.wants_trees:
                tokens = [(token.text.translate(unsafe), COLOURS[token.origin]) for token in traced_tokens(update)]
                text = "".join(f"{colour}{shown}{RESET}" for shown, colour in tokens if shown)
            print(text, end="", flush=True)
    return request.result()


def summary(output: GenerationOutput, seconds: float, *, compiled: bool) -> str:
    """In:  48 tokens, 0.5 seconds  Out: 48 tokens in 0.50 s, 96.0 tokens/s, accept length 2.94, ended by length"""
    count = len(output.token_ids)
    parts = [f"{count} token{'s' * (count != 1)} in {seconds:.2f} s, {count / seconds:.1f} tokens/s"]
    if output.speculation.verify_count:
        parts.append(f"accept length {output.speculation.accept_length:.2f}")
    parts.append(f"ended by {output.finish_reason}")
    if compiled:
        parts.append("including compilation")
    return ", ".join(parts)
