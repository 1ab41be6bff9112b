"""Speculative decoding (EAGLE, EAGLE-3, MTP, DFlash, small models, n-grams) for LLM serving in JAX.

>>> from jaxspec import LLM, SamplingParams
>>> LLM().generate("def fibonacci(n):", SamplingParams(max_tokens=32, temperature=0))[0].text  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING

from jaxspec.config import EngineConfig, TreeShape
from jaxspec.engine.request import GenerationOutput, Update
from jaxspec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxspec.async_llm import AsyncLLM
    from jaxspec.llm import LLM

__all__ = ["LLM", "AsyncLLM", "EngineConfig", "GenerationOutput", "SamplingParams", "TreeShape", "Update"]

_LOAD_JAX = {"LLM": "jaxspec.llm", "AsyncLLM": "jaxspec.async_llm"}
"""Imported at first use, since they load JAX and transformers; configuration alone does not."""


def __getattr__(name: str):
    if name in _LOAD_JAX:
        return getattr(import_module(_LOAD_JAX[name]), name)
    raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
