"""Tensor parallel: several devices say what one says, and exchange no more than sums and the parts of logits."""

import json
import os
import subprocess
import sys

import pytest

from jaxspec.planner.time_model import exchanges
from tests.engine.tensor_parallel import DEVICES, SHORT
from tests.sets import exhaustive

ONE_LAYER = "EAGLE-3, one layer"
COUNTED = {ONE_LAYER: (1, 2, 1), "EAGLE-3": (2, SHORT.num_steps, 1), "DFlash, windows": (2, 1, 2)}
"""Cases that run on two devices: layers of the target, forwards of the head in a cycle, and its layers."""
SOME = (
    "EAGLE-3",
    "MTP, biases",
    "DFlash, windows",
    "a small model",
    "odd vocabulary, feed-forward and draft vocabulary",
    "6 heads, 3 KV heads, normed",
    "few pages",
    "grammars",
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
    counts = (1, 2 if name in (*COUNTED, "grammars") else DEVICES)
    one, *others = run(name, *counts)
    assert all(set(text) - {text[0]} for text in one["texts"]), "the model repeats itself: nothing is tested"
    for devices, found in zip(counts[1:], others, strict=True):
        assert found["texts"] == one["texts"] and found["accepted"] == one["accepted"], devices
        assert found["collectives"].keys() <= {"all-reduce", "all-gather"}
        assert found["weight_bytes"] < one["weight_bytes"]
    assert one["collectives"] == {}
    assert one["counts"]["preemptions" if name == "few pages" else "prefix_hit_tokens"], "nothing was tested"
    if name in COUNTED:
        layers, forwards, of_head = COUNTED[name]
        sums, gatherings = 2 * layers + 1 + (2 * of_head + 1) * forwards, forwards + 2
        assert others[0]["collectives"] == {"all-reduce": sums, "all-gather": gatherings}
        assert exchanges(layers, forwards, of_head) == sums + gatherings, "the planner's"
        assert others[0]["cache_bytes"] == one["cache_bytes"] // 2
