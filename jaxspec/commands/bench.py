"""jaxspec bench: the benchmarks by name, and how to measure a running server with well-known clients."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from jaxspec.commands.common import run_guarded

PACKAGE = "jaxspec.bench" if find_spec("jaxspec.bench") else "benchmarks"
"""The folder benchmarks/ is installed as jaxspec.bench. A clone that is not installed has only the folder."""


BENCHMARKS = {
    "speculative": "find the fastest draft tree per batch size, and by how much; writes a file for `serve --config`",
    "acceptance": "how many drafts a head gets accepted: by depth, chains against trees",
    "serving": "latency, throughput and accept length of a running server with OpenAI's API",
    "peers": "compare with transformers, OpenVINO, CTranslate2 and llama.cpp on a CPU",
    "gpu": "the first hour on a GPU: kernels, matrix products, whole cycles, the engine, and what takes the time",
    "start": "seconds from launching a server to its first token",
    "report": "the tables of all results",
}
"""Modules of benchmarks/, each with its line in the list. Their `main` takes arguments and returns the exit status."""
CLIENTS = """For request rates, goodput, other endpoints and data sets use these clients (`jaxspec serve` listens on port 30000;
NAME is the model's name in the API, DIR its directory, for the tokenizer):

  SGLang's (`pip install sglang`), which prints the accept length:
    python -m sglang.bench_serving --backend sglang --base-url http://127.0.0.1:30000 --tokenizer DIR \\
      --dataset-name random-ids --random-input-len 256 --random-output-len 128 --num-prompts 64 --max-concurrency 8

  vLLM's (`pip install vllm`):
    vllm bench serve --backend openai --base-url http://127.0.0.1:30000 --model NAME --tokenizer DIR \\
      --dataset-name random --random-input-len 256 --random-output-len 128 --num-prompts 64 \\
      --request-rate 4 --goodput ttft:200 tpot:50

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
    name, *rest = arguments
    if name not in BENCHMARKS:
        print(f"jaxspec bench: error: unknown benchmark {name[:80]!r}; benchmarks: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    return run_guarded(f"jaxspec bench {name}", lambda: import_module(f"{PACKAGE}.{name}").main(rest))


def overview() -> str:
    """Every benchmark with one line, and the other clients."""
    lines = ["usage: jaxspec bench NAME [options]", "", "benchmarks (`jaxspec bench NAME --help` lists the options):"]
    lines += [f"  {name:<14} {summary}" for name, summary in BENCHMARKS.items()]
    return "\n".join([*lines, "", CLIENTS])
