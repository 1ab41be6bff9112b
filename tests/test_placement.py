"""What each of several devices holds of a model: all of it together, heads beside their keys and values; and programs on two."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxspec.placement import AXES, ONE_DEVICE, SPLITTABLE, Placement, Shares, axis_of
from jaxspec.testing import random_eagle, random_head, random_mtp, tiny_config, tiny_target
from tests.sets import exhaustive

WHOLE = {"weight", "draft_to_target"}
"""Last names of parameters that every device has: norms, and the token map."""


def test_every_parameter_is_split_or_known_to_be_whole():
    target = tiny_target(qkv_bias=True, qk_norm=True)
    config, found = target.config, set()
    eagle3 = random_head(config, fc_bias=True, norm_before_fc=True, layer={"num_layers": 2, "hidden_size": 16})
    for model in (target, eagle3, random_eagle(config), random_mtp(config), tiny_target(tie_word_embeddings=True)):
        for keys, array in flatten_dict(model.params).items():
            axis = axis_of(keys)
            assert (axis is None) == (keys[-1] in WHOLE), keys
            if axis is not None:
                assert axis.dimension < array.ndim and Shares(model_layer(model), 2).width(axis.name, array.shape[axis.dimension])
                found.add(axis)
    assert found == set(AXES.values())


def model_layer(model):
    return getattr(model.config, "layer", model.config)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("axis", ["vocab", "gate_up"])
def test_padded_axes_hold_every_number_once(axis, tp):
    shares = Shares(tiny_config(), tp)
    for size in (2, 10, 48, 130):
        parts = [shares.slices(axis, device, size) for device in range(tp)]
        for number, stretches in enumerate(zip(*parts, strict=True)):
            joined = np.concatenate([np.arange(size)[each] for each in stretches])
            half = size // len(parts[0])
            np.testing.assert_array_equal(joined, np.arange(number * half, (number + 1) * half))
        room = shares.width(axis, size) // len(parts[0])
        assert all(each.stop - each.start <= room for part in parts for each in part) and room * tp < size // len(parts[0]) + tp


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(8, 4, 2), (8, 4, 4), (8, 4, 8), (8, 2, 4), (8, 1, 8), (6, 3, 3), (8, 8, 1)])
def test_queries_are_beside_their_keys_and_values(heads, kv_heads, tp):
    """Query head h attends to KV head h // (heads / kv_heads), also among a device's own. Each number says what it is."""
    shares = Shares(tiny_config(num_heads=heads, num_kv_heads=kv_heads, head_dim=2), tp)
    names = [("q", head) for head in range(heads)] + [(kind, head) for kind in "kv" for head in range(kv_heads)]
    numbers = [(*name, place) for name in names for place in range(2)]
    seen = []
    for device in range(tp):
        held = [number for each in shares.slices("qkv", device, len(numbers)) for number in numbers[each]]
        assert len(held) == shares.width("qkv", len(numbers)) == 2 * (shares.heads + 2 * shares.kv_heads)
        q, k, v = ([head for kind, head, place in held if kind == wanted and place == 0] for wanted in "qkv")
        assert k == v and [head // (heads // kv_heads) for head in q] == [k[own // (len(q) // len(k))] for own in range(len(q))]
        (rows,) = shares.slices("heads", device, 2 * heads)
        assert list(range(rows.start, rows.stop)) == [2 * head + place for head in q for place in range(2)]
        seen += q
    assert seen == list(range(heads))


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(9, 3, 2), (6, 3, 2), (12, 6, 4)])
def test_heads_that_cannot_be_divided_stay_whole(heads, kv_heads, tp):
    shares = Shares(tiny_config(num_heads=heads, num_kv_heads=kv_heads), tp)
    assert (shares.heads, shares.kv_heads) == (heads, kv_heads)
    for axis in ("qkv", "heads"):
        assert shares.slices(axis, tp - 1, 96) == (slice(0, 96),) and shares.width(axis, 96) == 96


TWO_DEVICES = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
from jaxspec.checkpoints.loading import load_head, load_target
from jaxspec.config import EngineConfig, TreeShape
from jaxspec.decoding.programs import CycleProgram
from jaxspec.defaults import BUILT_IN_HEAD, BUILT_IN_TARGET
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationRequest
from jaxspec.engine.program_cache import enable_compilation_cache
from jaxspec.engine.runner import Start
from jaxspec.placement import Placement, SPLITTABLE
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import random_eagle, tiny_target

enable_compilation_cache()
if sys.argv[1] == "built-in":
    target = load_target(BUILT_IN_TARGET, jax.numpy.dtype("float32"))
    head = load_head(BUILT_IN_HEAD, target)
else:
    target = tiny_target(num_layers=1)
    head = random_eagle(target.config)
config = EngineConfig(max_running_requests=1, prefill_chunk=16, context_length=128, num_pages=8)
tree, found = TreeShape(1, 2, 3), dict()
for name, placement in dict(one=Placement(), two=Placement((0, 1), SPLITTABLE)).items():
    engine = Engine(target, head, None, tree, config, start=Start(placement=placement))
    requests = [
        engine.add(GenerationRequest(tuple(range(40, 60)), params))
        for params in (SamplingParams(max_tokens=24, temperature=0), SamplingParams(max_tokens=24, temperature=0.8, seed=3))
    ]
    while engine.has_work:
        engine.step()
    programs = engine.runner.programs
    compiled = programs[next(each for each in programs.compilations if isinstance(each, CycleProgram))].as_text()
    kernels = engine.runner.params["target"]["layers"][0]["mlp"]
    found[name] = dict(
        text=[request.output for request in requests],
        accepted=[request.speculation.accept_lengths for request in requests],
        sums=compiled.count(" all-reduce("),
        other=sum(compiled.count(f" {kind}(") for kind in ("all-gather", "collective-permute", "all-to-all", "reduce-scatter")),
        shard=kernels["down_proj"]["kernel"].sharding.shard_shape(kernels["down_proj"]["kernel"].shape),
        devices=sorted(str(each) for each in engine.runner.state.history.devices()),
    )
json.dump(dict(found=found, layers=target.config.num_layers, ffn=target.config.intermediate_size), sys.stdout)
"""


@pytest.mark.parametrize("model", ["tiny", exhaustive("built-in")])
def test_a_model_says_the_same_on_two_devices(model):
    """Each holds half of every feed-forward. One sum per layer of the target, and one for the head."""
    done = subprocess.run([sys.executable, "-c", TWO_DEVICES, model], check=True, stdout=subprocess.PIPE, timeout=600)
    printed = json.loads(done.stdout)
    one, two = (printed["found"][name] for name in ("one", "two"))
    assert two["text"] == one["text"] and two["accepted"] == one["accepted"]
    assert model == "tiny" or max(map(max, one["accepted"])) > 1
    assert (one["sums"], two["sums"], two["other"]) == (0, printed["layers"] + 1, 0)
    assert two["shard"][0] == printed["ffn"] // 2 == one["shard"][0] // 2
    assert (len(one["devices"]), len(two["devices"])) == (1, 2)


def test_axes_that_modules_can_not_share_are_refused():
    with pytest.raises(ValueError, match=r"devices can share ffn and gate_up together, or nothing; got \['qkv'\]"):
        Placement((0, 1), frozenset({"qkv"}))


def test_where_a_program_runs_is_part_of_its_identity():
    assert Placement() == ONE_DEVICE != Placement((1,)) and hash(Placement()) == hash(ONE_DEVICE)
    assert repr(Placement((0, 1), SPLITTABLE)) != repr(Placement((0, 1))) != repr(Placement())


def test_one_room_of_serving_knows_shardings():
    """Training and the planner, which compiles for devices that are not there, have their own meshes."""
    root = Path(__file__).parents[1] / "jaxspec"
    knows = {
        str(file.relative_to(root))
        for file in root.rglob("*.py")
        if re.search(r"jax\.sharding import|\bshard_map\(|SingleDeviceSharding\(", file.read_text())
    }
    assert {each for each in knows if each.split("/")[0] not in ("planner", "train")} == {"placement.py"}
