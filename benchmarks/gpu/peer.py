"""The `transformers` side of benchmarks.gpu: one decoding step of a Llama with random weights, in torch; prints one JSON object.

It runs in a process of its own, maybe in another Python environment, so it imports nothing of this project.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Takes the sizes as one JSON object from the command line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library that prints, in Python or C++, must not garble the answers
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        answer = measure(**json.loads(sys.argv[-1]))
    except ImportError as error:
        answer = {"missing": str(error)}
    except Exception as error:  # every failure goes to the process that asks
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
