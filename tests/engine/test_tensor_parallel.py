"""Tensor parallel: several devices say what one says, and exchange no more than sums and the parts of logits."""

import json
import os
import subprocess
import sys

import pytest

from tests.engine.tensor_parallel import DEVICES, SHORT
from tests.sets import exhaustive

ONE_LAYER = "EAGLE-3, one layer"
SOME = (
    "EAGLE-3",
    "MTP, biases",
    "DFlash, windows",
    "a small model",
    "odd vocabulary, feed-forward and draft vocabulary",
    "6 heads, 3 KV heads, normed",
    "few pages",
    "int4",
    "fp8 in blocks",
)
"""The program runs all of CASES on two and four devices."""


def run(name: str, *devices: int) -> list[dict]:
    """The outcomes of a case."""
    command = [sys.executable, "-m", "tests.engine.tensor_parallel", name, "--json", "--devices", *map(str, devices)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=900, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    return list(json.loads(done.stdout)[name].values())


@pytest.mark.parametrize("name", [ONE_LAYER, *map(exhaustive, SOME)])
def test_several_devices_say_what_one_says(name):
    counts = (1, 2 if name in (ONE_LAYER, "EAGLE-3") else DEVICES)
    one, *others = run(name, *counts)
    assert all(set(text) - {text[0]} for text in one["texts"]), "the model repeats itself: nothing is tested"
    for devices, found in zip(counts[1:], others, strict=True):
        assert found["texts"] == one["texts"] and found["accepted"] == one["accepted"], devices
        assert found["collectives"].keys() <= {"all-reduce", "all-gather"}
        assert found["weight_bytes"] < one["weight_bytes"]
    assert one["collectives"] == {}
    if name in (ONE_LAYER, "EAGLE-3"):
        layers, steps = (1, 2) if name == ONE_LAYER else (2, SHORT.num_steps)
        assert others[0]["collectives"] == {"all-reduce": 2 * layers + 1 + 3 * steps, "all-gather": steps + 2}
        assert others[0]["cache_bytes"] == one["cache_bytes"] // 2
