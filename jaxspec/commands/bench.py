"""jaxspec bench: the benchmarks by name, and how to measure a running server with the clients that people know."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple


class Benchmark(NamedTuple):
    """One of benchmarks/; its `main` takes arguments and returns the exit status."""

    name: str
    summary: str

    @property
    def module(self) -> str:
        return f"benchmarks.{self.name.replace('-', '_')}"


BENCHMARKS = (
    Benchmark("throughput", "tokens per second with and without speculation, accept length, the parts of a cycle, memory"),
    Benchmark("speculative", "picks the draft tree: every batch size, a file for `serve --config`, a picture"),
    Benchmark("acceptance", "how much of a head's drafts is accepted: by depth, chains against trees with as many nodes"),
    Benchmark("serving", "a load generator for a running server, ours or another: latencies, throughput, goodput, accept length"),
    Benchmark("lossless", "check-lossless over several trees and many prompts, with a record of the result"),
    Benchmark("under-load", "growing batches, the prefix cache, long prompts, the host's share of a cycle"),
    Benchmark("through-server", "what HTTP costs: tokens per second through the server against LLM.generate"),
    Benchmark("start", "how long a server takes from its launch to the first token"),
    Benchmark("peers", "against transformers, llama.cpp, vLLM and others with the same weights and prompts; those it finds"),
    Benchmark("report", "results as one page with plots, and as the tables of README and docs/"),
    Benchmark("gpu", "on a GPU, at the size of an 8B model: are the kernels right, and how near to its bandwidth are they"),
    Benchmark("conversion", "how fast checkpoints convert and load, and the memory that takes, on a synthetic 8B model"),
)
CLIENTS = """a running server, with the clients that people know (`jaxspec serve` listens on port 30000; NAME is the model's name in
the API, DIR its directory, for the tokenizer):

  SGLang's (`pip install sglang`), which prints the accept length:
    python -m sglang.bench_serving --backend sglang --base-url http://127.0.0.1:30000 --tokenizer DIR \\
      --dataset-name random-ids --random-input-len 256 --random-output-len 128 --num-prompts 64 --max-concurrency 8

  vLLM's (`pip install vllm`):
    vllm bench serve --backend openai --base-url http://127.0.0.1:30000 --model NAME --tokenizer DIR \\
      --dataset-name random --random-input-len 256 --random-output-len 128 --num-prompts 64 --max-concurrency 8

  guidellm (`pip install guidellm`), whose "Output Tok per Stream Iter" is about the accept length:
    guidellm run --backend kind=openai_http,target=http://127.0.0.1:30000 --profile kind=concurrent,streams=8 \\
      --constraint kind=max_duration,seconds=60 --data kind=synthetic_text,prompt_tokens=256,output_tokens=128 \\
      --tokenizer kind=huggingface_auto,model=DIR

Random tokens are hard to draft: accept lengths are those of real text only with prompts of real text."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark and returns its exit status; 2 if there is no such benchmark."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0
    chosen = next((benchmark for benchmark in BENCHMARKS if benchmark.name == arguments[0]), None)
    if chosen is None:
        listed = ", ".join(benchmark.name for benchmark in BENCHMARKS)
        print(f"jaxspec bench: error: {arguments[0][:80]!r} is no benchmark: there is {listed}", file=sys.stderr)
        return 2

    from benchmarks.engines import run_guarded

    return run_guarded(lambda: import_module(chosen.module).main(arguments[1:]))


def overview() -> str:
    """Every benchmark with one line, and the standard clients."""
    lines = ["usage: jaxspec bench NAME [options]", "", "benchmarks of this machine (`jaxspec bench NAME --help` for options):"]
    lines += [f"  {benchmark.name:<14} {benchmark.summary}" for benchmark in BENCHMARKS]
    return "\n".join([*lines, "", CLIENTS])
