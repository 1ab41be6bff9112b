"""What each of several devices holds of a model: all of it together, heads beside their keys and values; and programs on two."""

import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxspec.checkpoints.layout import COPIED, Stacked
from jaxspec.checkpoints.storing import with_storage
from jaxspec.models.linear import parameters
from jaxspec.models.registry import layer_config
from jaxspec.models.sharing import AXES, Shares, axis_of, parts_of
from jaxspec.placement import ONE_DEVICE, Placement, available_devices
from jaxspec.testing import random_eagle, random_head, random_mtp, tiny_config, tiny_target
from pallas_kernels.quantized import InBlocks, QuantizedAs
from pallas_kernels.rows import AsInFile, ByRows
from pallas_kernels.weight import Dense

WHOLE = {"weight", "draft_to_target"}
"""Last names of parameters that every device has: norms, and the token map."""


def test_a_signal_comes_once_the_devices_are_found(monkeypatch):
    found = []

    def devices() -> list:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            found.extend(range(1000))  # a place where a handler would run
        except:  # noqa: E722  # as JAX around the initialization of a plugin
            found.clear()
        return found

    monkeypatch.setattr(jax, "devices", devices)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    with pytest.raises(KeyboardInterrupt):
        available_devices()
    signal.signal(signal.SIGINT, before)
    assert found, "not in between"


def test_every_parameter_is_split_or_known_to_be_whole():
    target = tiny_target(qkv_bias=True, qk_norm=True)
    config, found = target.config, set()
    eagle3 = random_head(config, fc_bias=True, norm_before_fc=True, layer={"num_layers": 2, "hidden_size": 16})
    others = tiny_target(tie_word_embeddings=True), tiny_target(kv_scales=True)
    for model in (target, eagle3, random_eagle(config), random_mtp(config), *others):
        for keys, array in flatten_dict(model.params).items():
            axis = axis_of(keys)
            assert (axis is None) == (keys[-1] in WHOLE), keys
            if axis is not None:
                (part,) = parts_of({str(keys[-1]): array}, axis, Shares(layer_config(model.config), 2)).values()
                assert 2 * part.width == array.shape[part.dimension], keys
                found.add(axis)
    assert found == set(AXES.values())


STORAGES = {
    "dense": Dense,
    "rows": ByRows(),
    "q8_0": InBlocks(),
    "int8": QuantizedAs("int8"),
    "fp8": QuantizedAs("fp8"),
    "int4": QuantizedAs("int4", 64),
    "int4 in blocks": QuantizedAs("int4", 32, has_zeros=True, for_cpu=True),
    "gate and up in different formats": AsInFile(((160, "float32"), (160, "q8_0"))),
}


@pytest.mark.parametrize("name", STORAGES)
def test_a_part_of_a_matrix_makes_a_part_of_the_product(name):
    """Whatever the storage: parts of the outputs stand side by side, and parts of the inputs add up. (The feed-forward's width
    does not divide evenly, so there is padding.)"""
    storage, width = STORAGES[name], 320
    shares = Shares(with_storage(tiny_config(intermediate_size=width), storage), 3)
    x = jax.random.normal(jax.random.key(0), (3, width))
    cases = {"gate_up_proj": (64, width), "down_proj": (width, 64)}
    for layer in list(cases)[: 1 if isinstance(storage, AsInFile) else 2]:
        axis, inputs = AXES[layer], cases[layer][0]
        weight = storage(jax.random.normal(jax.random.key(1), cases[layer]))
        arrays, whole = parameters(weight), np.asarray(weight.dot(x[:, :inputs]))
        parts, products = parts_of(arrays, axis, shares), []
        for device in range(3):
            own = {each: parts[each].of(np.asarray(arrays[each]), device, arrays[each].dtype) for each in parts}
            local = jax.tree.unflatten(jax.tree.structure(weight), map(jnp.asarray, (arrays | own).values()))
            mine = x[:, :inputs]
            if axis.is_input:
                (stretch,), room = shares.slices("ffn", device, width), shares.width("ffn", width)
                mine = jnp.pad(x[:, stretch], ((0, 0), (0, room - (stretch.stop - stretch.start))))
            products.append(np.asarray(local.dot(mine)))
        if axis.is_input:
            np.testing.assert_allclose(sum(products), whole, rtol=1e-4, atol=1e-3)
            continue
        room = shares.room("gate_up", width)[0]
        for device, product in enumerate(products):
            for number, stretch in enumerate(shares.slices("gate_up", device, width)):
                own_columns = slice(number * room, number * room + stretch.stop - stretch.start)
                np.testing.assert_allclose(product[:, own_columns], whole[:, stretch], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("rows", [[7], [COPIED + 3], [5, 2 * COPIED, 9]])
def test_a_part_is_written_as_it_is_read(rows, is_transposed):
    rng = np.random.default_rng(0)
    stacked = Stacked([rng.standard_normal((count, 6)).astype(np.float16) for count in rows], is_transposed)
    whole, size = stacked.join(), sum(rows)
    for own, others in ((slice(None), slice(None)), (slice(2, size - 1), slice(1, 4)), (slice(3, 3), slice(0, 2))):
        index = (others, own) if is_transposed else (own, others)
        out = np.empty(whole[index].shape, np.float32)
        stacked.copy_to(out, index)
        np.testing.assert_array_equal(out, whole[index])


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
    assert not any(shares.divides(axis) for axis in AXES.values() if axis.name in ("qkv", "heads", "kv_heads"))
    assert shares.divides(AXES["down_proj"]) and not Shares(shares.config, 1).divides(AXES["down_proj"])


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match="tp_size=2 needs 2 devices, and JAX finds 1; JAX_NUM_CPU_DEVICES=2 makes virtual ones"):
        Placement.of(2)


def test_where_a_program_runs_is_part_of_its_identity():
    assert Placement() == ONE_DEVICE != Placement((1,)) and hash(Placement()) == hash(ONE_DEVICE)
    assert repr(Placement((0, 1))) != repr(Placement())


def test_one_room_of_serving_knows_shardings():
    """Training and the planner, which compiles for devices that are not there, have their own meshes."""
    root = Path(__file__).parents[1] / "jaxspec"
    knows = {
        str(file.relative_to(root))
        for file in root.rglob("*.py")
        if re.search(r"jax\.sharding import|\bshard_map\(|SingleDeviceSharding\(", file.read_text())
    }
    assert {each for each in knows if each.split("/")[0] not in ("planner", "train")} == {"placement.py"}


def test_a_group_gives_as_many_devices_of_each_host(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(process_index=number // 4) for number in range(8)])
    assert Placement.of(4) == Placement((0, 1, 4, 5))
    for wrong in (3, 10):
        with pytest.raises(ValueError, match=f"tp_size={wrong} needs as many devices of each of 2 hosts"):
            Placement.of(wrong)
