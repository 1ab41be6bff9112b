"""Sets of tests that run only when asked for (`python -m pytest -m exhaustive`). pyproject.toml says what each is."""

from functools import partial

import pytest

SETS = ("variants", "exhaustive", "gpu_compiler", "clients", "browser")
"""Markers."""

variants = partial(pytest.param, marks=pytest.mark.variants)
"""Arguments of a test that the default set does without."""
exhaustive = partial(pytest.param, marks=pytest.mark.exhaustive)
"""Arguments of a test that neither the default set nor `variants` has."""
