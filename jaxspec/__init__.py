"""Speculative decoding (EAGLE, EAGLE-3, MTP, DFlash, small models, n-grams) for LLM serving in JAX.

>>> from jaxspec import LLM, SamplingParams
>>> LLM().generate("def fibonacci(n):", SamplingParams(max_tokens=32, temperature=0))[0].text  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxspec.async_llm import AsyncLLM
    from jaxspec.config import EngineConfig
    from jaxspec.engine.request import GenerationOutput, Update
    from jaxspec.llm import LLM
    from jaxspec.sampling_params import SamplingParams
    from jaxspec.tree_shape import TreeShape

__all__ = ["LLM", "AsyncLLM", "EngineConfig", "GenerationOutput", "SamplingParams", "TreeShape", "Update"]

_MODULES = {
    "LLM": "llm", "AsyncLLM": "async_llm", "EngineConfig": "config", "TreeShape": "tree_shape",
    "GenerationOutput": "engine.request", "Update": "engine.request", "SamplingParams": "sampling_params",
}  # fmt: skip
"""Imported at first use: some load JAX and transformers, and processes that import one small module load none of them."""


def __getattr__(name: str):
    if name in _MODULES:
        return getattr(import_module(f"jaxspec.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
