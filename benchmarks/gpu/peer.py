"""transformers on a GPU: one decoding step of a Llama with random weights, compared with our plain cycle.

This file is also the script of the process that runs it, maybe in another Python environment: `main` and the functions below it
import nothing of this project.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .supervisor import Supervisor


START = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
"""Runs the file without putting its folder on sys.path."""
LONGEST = 150.0
"""Seconds for the peer; torch.compile takes most of them."""


def run_peer(supervisor: "Supervisor", python: str, size_name: str, deadline: float) -> None:
    """Adds a section `peer` to the results; it is skipped without torch."""
    from .supervisor import GRACE

    started = time.time()
    supervisor.take({"kind": "section", "section": "peer", "cases": 2})
    left = min(LONGEST, deadline + GRACE - started)
    if started > deadline:
        supervisor.skip("peer", {}, "time budget: no time was left for this section")
    else:
        take_answer(supervisor, ask(python, size_name, left))
    supervisor.take({"kind": "finished", "section": "peer", "seconds": time.time() - started})


def ask(python: str, size_name: str, seconds: float) -> dict:
    """The answer of the process; {"error": ...} if there is none."""
    from jaxspec.checkpoints.exporting import hf_config

    from .sizes import SIZES

    size, cuda = SIZES[size_name], size_name != "tiny"
    task = {
        "config": hf_config(size.target),
        "context": size.goal_context,
        "steps": 20 if cuda else 2,
        "samples": size.samples,
        "cuda": cuda,
    }
    command = [python, "-c", START, __file__, json.dumps(task)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer after {seconds:.0f} s"}
    except OSError as error:
        return {"error": f"{python} can't be started: {error}"}
    except json.JSONDecodeError:
        return {"error": f"status {done.returncode}, {' '.join(done.stderr.split())[-500:]}"}


def take_answer(supervisor: "Supervisor", answer: dict) -> None:
    """Adds rows for the timed steps, with their ratio to our plain cycle of the same run."""
    if "missing" in answer:
        reason = f"{answer['missing']}: install torch and transformers, or name a Python that has them with --torch-python"
        supervisor.skip("peer", {}, reason)
        return
    if "error" in answer:
        supervisor.take({"kind": "failed", "section": "peer", "case": {}, "error": answer["error"]})
        return
    ours = [row for row in supervisor.results.get("cycle", {}).get("rows", []) if row["tree"] == "plain"]
    for name in ("not compiled", "compiled"):
        timed = answer.pop(name)
        full_name = f"transformers, {name}"
        if "error" in timed:
            supervisor.take({"kind": "failed", "section": "peer", "case": {"name": full_name}, "error": timed["error"]})
            continue
        row = {"name": full_name, **timed, **answer}
        if ours:
            row["over_plain_cycle"] = median(timed["milliseconds"]) / median(ours[0]["milliseconds"])
        supervisor.take({"kind": "row", "section": "peer", "row": row})


# The process


def main() -> None:
    """Takes the sizes as a JSON object from the command line, prints a JSON object."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print must not garble the answers
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        answer = measure(**json.loads(sys.argv[-1]))
    except ImportError as error:
        answer = {"missing": str(error)}
    except Exception as error:  # the asking process decides what a failure means
        answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:600]}
    print(json.dumps(answer), file=answers, flush=True)


def measure(config: dict, context: int, steps: int, samples: int, cuda: bool) -> dict[str, Any]:
    """Milliseconds per greedy decoding step at batch 1 with a static cache: plain, and compiled with CUDA graphs.

    `cuda` False is for trying this without a GPU.
    """
    import torch
    import transformers

    if cuda and not torch.cuda.is_available():
        return {"missing": "torch finds no CUDA device"}
    device = "cuda" if cuda else "cpu"
    transformers.utils.logging.set_verbosity_error()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(config)).eval()
    torch.set_default_dtype(torch.float32)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "cuda": torch.version.cuda}
    device_name = torch.cuda.get_device_name() if cuda else "CPU"
    answer: dict[str, Any] = {"versions": versions, "device": device_name, "context": context, "steps_per_sample": steps}
    compiled = torch.compile(model.forward, mode="reduce-overhead") if cuda else torch.compile(model.forward)
    for name, forward in (("not compiled", model.forward), ("compiled", compiled)):
        try:
            answer[name] = time_steps(torch, transformers, model, forward, context, steps, samples)
        except Exception as error:
            answer[name] = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
    return answer


def time_steps(torch: Any, transformers: Any, model: Any, forward: Callable, context: int, steps: int, samples: int) -> dict:
    """The prompt is prefilled without compiling; each step feeds the likeliest token back."""
    warm_up, device = 4, model.device
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    with torch.no_grad():
        room = context + warm_up + steps * samples
        cache = transformers.StaticCache(config=model.config, max_cache_len=room)
        prompt = torch.randint(0, model.config.vocab_size, (1, context), device=device)
        logits = model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token, position = logits[:, -1:].argmax(-1), torch.tensor([[context]], device=device)

        def step(token, position):
            torch.compiler.cudagraph_mark_step_begin()
            logits = forward(token, position_ids=position, past_key_values=cache, use_cache=True).logits
            return logits[:, -1:].argmax(-1).clone(), position + 1

        started = time.perf_counter()
        for _ in range(warm_up):
            token, position = step(token, position)
        synchronize()
        first, values = time.perf_counter() - started, []
        for _ in range(samples):
            started = time.perf_counter()
            for _ in range(steps):
                token, position = step(token, position)
            synchronize()
            values.append((time.perf_counter() - started) / steps * 1e3)
    return {"milliseconds": values, "warm_up_seconds": first}


if __name__ == "__main__":
    main()
