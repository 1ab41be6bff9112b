"""transformers on the CPU with torch: generate, its prompt lookup decoding, and its assisted generation.

torch.compile is not among the ways: on two cores it was not ready after four minutes.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

from side import ASSISTED, LOOKUP, PLAIN, Generate, Offer, Task, serve

ATTENTIONS = ("eager", "sdpa")


def load(task: Task) -> Offer:
    """Plain decoding has ways with a growing cache and with a fixed one; speculation crops the cache, so there it must grow."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(task.threads)

    def pretrained(directory: str, attention: str) -> Any:
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attention, "local_files_only": True}
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, **options).eval()
        # The same number of tokens for everybody: nothing ends a text early.
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model

    models = {attention: pretrained(task.model, attention) for attention in ATTENTIONS}
    plain = {attention: generator(torch, model) for attention, model in models.items()}
    sdpa = models["sdpa"]
    plain["sdpa, static cache"] = generator(torch, sdpa, lambda: static_cache(transformers, sdpa, task.context))
    offer = {
        PLAIN: plain,
        LOOKUP: {
            f"{attention}, {tokens} tokens": generator(torch, models[attention], lookup(tokens))
            for attention, tokens in product(ATTENTIONS, task.lookups)
        },
    }
    if task.assistant:
        assistant = pretrained(task.assistant, "sdpa")
        offer[ASSISTED] = {
            attention: generator(torch, model, lambda: {"assistant_model": assistant}) for attention, model in models.items()
        }
    return offer


def lookup(tokens: int) -> Callable[[], dict]:
    """Options of generate for prompt lookup."""
    return lambda: {"prompt_lookup_num_tokens": tokens}


def static_cache(transformers: Any, model: Any, context: int) -> dict:
    """Options of generate for a cache of always the same size, which is never copied to grow."""
    return {"past_key_values": transformers.StaticCache(config=model.config, max_cache_len=context)}


def generator(torch: Any, model: Any, options: Callable[[], dict] = dict) -> Generate:
    """Through `model.generate`; `options` are asked for before every prompt."""

    def generate(prompt: list[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                use_cache=True,
                **options(),
            )
        return out[0, len(prompt) :].tolist()

    return generate


if __name__ == "__main__":
    serve(["torch", "transformers"], load)
