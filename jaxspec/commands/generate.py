"""jaxspec generate: completes one prompt on the terminal, every token in the colour of how it came."""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxspec.commands.common import run_guarded
from jaxspec.commands.options import Parser, add_model_options, add_tree_options, chosen_tree, whole
from jaxspec.engine.output import BONUS, DRAFT, PLAIN, PREFILL, TokenTrace
from jaxspec.engine.request import GenerationOutput
from jaxspec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxspec.llm import LLM

COLOURS = {DRAFT: "\033[32m", BONUS: "\033[33m", PLAIN: "", PREFILL: ""}
LEGEND = {DRAFT: "accepted draft", BONUS: "bonus", PLAIN: "plain"}
RESET = "\033[0m"
EXAMPLES = """examples:
  jaxspec generate "def fibonacci(n):"
  jaxspec generate - --max-tokens 64 < prompt.txt
  jaxspec generate --chat "Why is the sky blue?" --model-path Llama-3.1-8B-Instruct --draft EAGLE3-LLaMA3.1-Instruct-8B"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked as far as that needs no model."""
    parser = Parser("jaxspec generate", "Complete one prompt; the text goes to stdout, what it took to stderr.", EXAMPLES)
    parser.add_argument("prompt", help="the text to go on from; - reads it from stdin")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message: put it into the model's chat template")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="auto: on a terminal")
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=whole(1), default=128, metavar="N", help="tokens to generate (default: %(default)s)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="of the likeliest tokens (default: %(default)s, all)")
    group.add_argument("--top-k", type=int, default=-1, metavar="K", help="of the likeliest tokens (default: all)")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="share of the likeliest token's probability")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text, with any tree or none")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given again")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end-of-sequence token")
    add_model_options(parser)
    parser.add_argument("--context-length", type=whole(2), metavar="N", help="longest prompt and output (default: the model's)")
    add_tree_options(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if the engine failed; 2 if the command line or a file is wrong."""
    options = parse(argv)
    return run_guarded("jaxspec generate", lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Loads, compiles, streams. Raises ValueError or OSError saying what is wrong."""
    spec = chosen_tree(options)
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos")
    params = SamplingParams(**{name: getattr(options, name) for name in names})
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt

    from jaxspec.commands.workbench import CompilationCounter, Workbench

    bench = Workbench.of(options, spec=spec, context_length=options.context_length, progress=sys.stderr.isatty())
    (tokens,) = bench.encode([prompt], chat=options.chat)
    compile_ahead(bench.llm, tokens)
    counter = CompilationCounter()
    coloured = options.color == "always" or (options.color == "auto" and sys.stdout.isatty())
    started = time.perf_counter()
    output = stream(bench.llm, tokens, params, coloured=coloured)
    seconds = time.perf_counter() - started
    print(flush=True)
    if output.error:
        print(f"jaxspec generate: error: {output.error}", file=sys.stderr)
        return 1
    if coloured:
        print("\n" + "  ".join(f"{COLOURS[origin]}{name}{RESET}" for origin, name in LEGEND.items()), file=sys.stderr)
    print(summary(output, seconds, compiled=counter.count > 0), file=sys.stderr)
    return 0


def compile_ahead(llm: "LLM", tokens: Sequence[int]) -> None:
    """Compiles the programs that the prompt needs, by a request that is thrown away, so that the time taken is the model's."""
    if sys.stderr.isatty():
        print("compiling, if that was not done before ...", end="", file=sys.stderr, flush=True)
    llm.generate([tokens], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    llm.engine.flush_cache()
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def stream(llm: "LLM", tokens: Sequence[int], params: SamplingParams, *, coloured: bool) -> GenerationOutput:
    """Prints the text as it comes; returns the whole."""
    trace = TokenTrace(llm.tokenizer, params)
    for update in llm.stream(tokens, params):
        text = update.text
        if coloured:
            text = "".join(f"{COLOURS[token.origin]}{token.text}{RESET}" for token in trace.add(update) if token.text)
        print(text, end="", flush=True)
        if update.output:
            return update.output
    raise AssertionError("the engine ended a stream without a result")


def summary(output: GenerationOutput, seconds: float, *, compiled: bool) -> str:
    """In:  48 tokens, 0.5 seconds  Out: 48 tokens in 0.50 s, 96.0 tokens/s, accept length 2.94, ended by length"""
    count = len(output.token_ids)
    parts = [f"{count} token{'s' * (count != 1)} in {seconds:.2f} s, {count / seconds:.1f} tokens/s"]
    if output.speculation.verify_count:
        parts.append(f"accept length {output.speculation.accept_length:.2f}")
    parts.append(f"ended by {output.finish_reason}")
    if compiled:
        parts.append("compiling included")
    return ", ".join(parts)
