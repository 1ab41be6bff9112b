"""jaxspec bench: the benchmarks by name, and how to measure a running server with well-known clients."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from jaxspec.commands.common import run_guarded

PACKAGE = "jaxspec.bench" if find_spec("jaxspec.bench") else "benchmarks"
"""The folder benchmarks/ is installed as jaxspec.bench. A clone that is not installed has only the folder."""


class Benchmark(NamedTuple):
    """A module of benchmarks/. Its `main` takes arguments and returns the exit status."""

    name: str
    summary: str

    @property
    def module(self) -> str:
        return f"{PACKAGE}.{self.name}"


BENCHMARKS = (
    Benchmark("speculative", "find the fastest draft tree per batch size; writes a file for `serve --config` and a picture"),
    Benchmark("throughput", "tokens/s with and without speculation, accept length, parts of a cycle, memory"),
    Benchmark("acceptance", "how many drafts a head gets accepted: by depth, chains against trees"),
    Benchmark("serving", "latency, throughput and goodput of a running server (OpenAI or SGLang API)"),
    Benchmark("peers", "compare with transformers, OpenVINO, CTranslate2, llama.cpp and vLLM on a CPU"),
    Benchmark("gpu", "the first hour on a GPU: kernels, matrix products, whole cycles, the engine, and what takes the time"),
    Benchmark("lossless", "check-lossless over several trees and many prompts, with a record"),
    Benchmark("start", "seconds from launching a server to its first token"),
    Benchmark("report", "one HTML page with tables and plots of all results"),
)
CLIENTS = """For more load patterns and data sets use these clients (`jaxspec serve` listens on port 30000; NAME is the model's name
in the API, DIR its directory, for the tokenizer):

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

Random prompts give unrealistically low accept lengths: use real text to measure speculation."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark and returns its exit status; 2 if there is no such benchmark."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0
    chosen = next((benchmark for benchmark in BENCHMARKS if benchmark.name == arguments[0]), None)
    if chosen is None:
        names = ", ".join(benchmark.name for benchmark in BENCHMARKS)
        print(f"jaxspec bench: error: unknown benchmark {arguments[0][:80]!r}; benchmarks: {names}", file=sys.stderr)
        return 2
    return run_guarded(f"jaxspec bench {chosen.name}", lambda: import_module(chosen.module).main(arguments[1:]))


def overview() -> str:
    """Every benchmark with one line, and the other clients."""
    lines = ["usage: jaxspec bench NAME [options]", "", "benchmarks (`jaxspec bench NAME --help` lists the options):"]
    lines += [f"  {benchmark.name:<14} {benchmark.summary}" for benchmark in BENCHMARKS]
    return "\n".join([*lines, "", CLIENTS])
