"""OpenVINO GenAI on the CPU: its two attention backends, and its prompt lookup. optimum-intel exports the model."""

import os

from side import LOOKUP, PLAIN, Generate, Offer, Task, serve

BACKENDS = ("SDPA", "PA")
NGRAM = 2
"""Tokens that must be found again before lookup proposes what followed them; what transformers takes at most, too."""


def load(task: Task) -> Offer:
    """The model in float32, also where OpenVINO would compute or cache in 16 bits."""
    export(task.model, task.directory)
    plain = {backend: generator(task, 0, ATTENTION_BACKEND=backend) for backend in BACKENDS}
    return {PLAIN: plain, LOOKUP: {f"{tokens} tokens": generator(task, tokens, prompt_lookup=True) for tokens in task.lookups}}


def export(model: str, directory: str) -> None:
    """Writes OpenVINO's graph and weights."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from optimum.intel import OVModelForCausalLM

    exported = OVModelForCausalLM.from_pretrained(
        model, export=True, compile=False, load_in_8bit=False, use_cache=True, torch_dtype=torch.float32
    )
    exported.save_pretrained(directory)


def generator(task: Task, tokens: int, **options: object) -> Generate:
    """A pipeline of its own; `tokens` > 0: so many are proposed by prompt lookup."""
    import numpy
    import openvino
    import openvino_genai

    precision = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": task.threads}
    # Prompts are token ids: the tokenizer of the exported directory has no model of its own, and none is asked of it.
    tokenizer = openvino_genai.Tokenizer(task.directory)
    pipeline = openvino_genai.LLMPipeline(task.directory, tokenizer, "CPU", **precision, **options)
    config = openvino_genai.GenerationConfig()
    config.do_sample, config.ignore_eos = False, True
    if tokens:
        config.num_assistant_tokens, config.max_ngram_size = tokens, NGRAM

    def generate(prompt: list[int], max_tokens: int) -> list[int]:
        config.max_new_tokens = max_tokens
        ids = numpy.array([prompt], dtype=numpy.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
        return list(pipeline.generate(inputs, config).tokens[0])

    return generate


if __name__ == "__main__":
    serve(["openvino-genai", "openvino", "optimum-intel", "torch"], load)
