"""EAGLE-3 speculative decoding for LLM serving in JAX.

>>> from jaxspec import LLM, SamplingParams
>>> LLM().generate("def fibonacci(n):", SamplingParams(max_tokens=32, temperature=0))[0].text  # doctest: +SKIP
"""

from jaxspec.config import EngineConfig as EngineConfig
from jaxspec.config import SpecConfig as SpecConfig
from jaxspec.engine.request import GenerationOutput as GenerationOutput
from jaxspec.engine.request import Update as Update
from jaxspec.sampling_params import SamplingParams as SamplingParams


def __getattr__(name: str):
    """LLM loads JAX and transformers; configuration alone does not."""
    if name == "LLM":
        from jaxspec.llm import LLM

        return LLM
    raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")
