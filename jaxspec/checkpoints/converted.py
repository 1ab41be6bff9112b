"""Converted checkpoints: the manifest, with a hash of every parameter and file, and loading straight onto the devices.

A converted checkpoint is a directory:

    jaxspec.json      the manifest
    parameters/       safetensors files of the model's parameters in its own layout (parameter_store.py)
    draft/            a target's draft head, a converted checkpoint itself, if it was converted with one
    config.json, tokenizer files, chat template, ...   copies from the original
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from pathlib import Path, PurePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from jaxspec.checkpoints.checkpoint import Checkpoint, log_link
from jaxspec.checkpoints.json_files import TEMPLATES, check_files, read_object
from jaxspec.checkpoints.kinds import MANIFEST
from jaxspec.checkpoints.layout import Keys
from jaxspec.checkpoints.parameter_store import mapped_parameters
from jaxspec.checkpoints.storing import Storing, config_stored_as, restored_layer
from jaxspec.checks import MAX_REASON, Fields, Flag, ListOf, ObjectOf, OrNull, Text, Whole
from jaxspec.config_json import MAX_LAYERS, MODEL, ROPE, SIZE, TOKEN_ID
from jaxspec.model_config import ModelConfig
from jaxspec.models.block import BlockConfig, DSparkConfig
from jaxspec.models.eagle import EagleConfig
from jaxspec.models.eagle3 import Eagle3Config
from jaxspec.models.head import HeadConfig
from jaxspec.models.mtp import MTPConfig
from jaxspec.models.registry import LoadedModel, abstract_model, build_model, layer_config
from jaxspec.placement import ONE_DEVICE, Placement
from jaxspec.rope import RopeConfig
from pallas_kernels.quantized import QuantizedAs

MAX_IDS = 2**24
LAYER = Fields(
    {name: check for name, check in MODEL.items() if name in ModelConfig.__dataclass_fields__}
    | {"num_layers": MODEL["num_hidden_layers"], "num_heads": SIZE, "num_kv_heads": SIZE, "qkv_bias": Flag(), "qk_norm": Flag()}
    | {"kv_scales": Flag(), "eos_token_ids": ListOf(TOKEN_ID)}
    | {
        "rope": Fields(
            {name: check for name, check in ROPE.items() if name in RopeConfig.__dataclass_fields__}
            | {"theta": ROPE["rope_theta"], "kind": Text(), "original_max_position": SIZE},
            nulls=(),
        )
    },
    nulls=(),
)
HEAD = Fields(
    {name: check for name, check in MODEL.items() if name in Eagle3Config.__dataclass_fields__}
    | {"layer": LAYER, "captured_layers": ListOf(Whole(0, MAX_LAYERS)), "own_embedding": Flag(), "fc_bias": Flag()}
    | {"target_layers": SIZE, "block_size": SIZE, "mask_token_id": TOKEN_ID, "predicts_next": Flag(), "markov_rank": SIZE}
    | {"causal": ListOf(Flag(), MAX_LAYERS), "windows": ListOf(OrNull(SIZE), MAX_LAYERS)},
    nulls=("draft_vocab_size",),
)
STORAGE = Fields({"kind": Text(), "group": Whole(1, 2**20), "has_zeros": Flag(), "for_cpu": Flag()}, nulls=("group",))
"""A QuantizedAs."""
CONTENTS = Fields(
    {
        "kind": Text(),
        "dialect": Text(),
        "hashes": ObjectOf(Text(64)),
        "files": ObjectOf(Text(64)),
        "made_for": ObjectOf(SIZE),
        "token_map": ListOf(TOKEN_ID, MAX_IDS),
        "draft": Text(64),
    },
    nulls=("token_map", "draft"),
)
"""The types and ranges in jaxspec.json; `config` is a LAYER for a target, else a HEAD."""
DRAFT = "draft"
PARAMETERS = "parameters"
VERSION = 2
KINDS: dict[str, type] = {
    "target": ModelConfig,
    **{kind.algorithm: kind for kind in (EagleConfig, Eagle3Config, MTPConfig, BlockConfig, DSparkConfig)},
}


@dataclass(frozen=True)
class Manifest:
    """The contents of jaxspec.json."""

    config: ModelConfig | HeadConfig
    dialect: str
    """The format of the original."""
    hashes: dict[str, str]
    """Parameter name, such as layers.0.mlp.down_proj.kernel -> SHA-256 of its bytes in C order, in hexadecimal."""
    files: dict[str, str]
    """Name of every copied file -> its SHA-256."""
    made_for: dict[str, int] = field(default_factory=dict)
    """For a head: hidden_size, num_layers and vocab_size of its target."""
    token_map: list[int] | None = None
    """Target ids that a head without an lm_head of its own drafts among (FR-Spec); None: all."""
    draft: str | None = None
    """For a target: the digest of its head's manifest, `draft/jaxspec.json`; None: no head."""

    @property
    def kind(self) -> str:
        """target, or a head's algorithm."""
        return next(name for name, config in KINDS.items() if type(self.config) is config)

    @property
    def target(self) -> ModelConfig:
        """The config of a target. Raises ValueError for a head."""
        if not isinstance(self.config, ModelConfig):
            raise ValueError(f"this is not a target but a converted {self.kind} head")
        return self.config

    @property
    def head(self) -> HeadConfig:
        """The config of a draft head. Raises ValueError for a target."""
        if not isinstance(self.config, HeadConfig):
            raise ValueError("this is not a draft head but a converted target")
        return self.config

    def write(self, directory: Path) -> None:
        """Writes jaxspec.json. Write it last: only this file makes the directory a checkpoint."""
        contents = {"format": "jaxspec checkpoint", "version": VERSION, "kind": self.kind, **asdict(self, dict_factory=_given)}
        (directory / MANIFEST).write_text(json.dumps({**contents, "digest": digest(contents)}, indent=1) + "\n")


def _given(values: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dataclass as a dict, without what is None."""
    return {name: value for name, value in values if value is not None}


def digest(contents: dict) -> str:
    """SHA-256 of a manifest's contents, `digest` left out, as JSON with sorted keys."""
    rest = {name: value for name, value in contents.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def manifest_digest(directory: Path) -> str:
    check_files(directory)
    return digest(read_object(directory / MANIFEST))


def is_converted(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def read_manifest(directory: Path) -> Manifest:
    """The manifest. Raises ValueError if it is damaged, has an unknown version, or lies beside links to files elsewhere."""
    path = directory / MANIFEST
    check_files(directory, DRAFT)
    contents = read_object(path)
    if contents.get("version") != VERSION:
        raise ValueError(f"{path} has version {contents.get('version')!r}; expected {VERSION}: convert the original again")
    if contents.get("digest") != digest(contents):
        raise ValueError(f"{path} was changed after it was written: convert the original again")
    try:
        contents = CONTENTS.clean("it", contents)
        values = (LAYER if contents["kind"] == "target" else HEAD).clean("config", contents["config"])
        config = _build(KINDS[contents["kind"]], values)
        manifest = Manifest(config, **{name: contents[name] for name in CONTENTS.checks if name in contents and name != "kind"})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__} {str(error)[:MAX_REASON]}") from None
    layers = (config if isinstance(config, ModelConfig) else config.layer).num_layers
    if layers > len(manifest.hashes):
        raise ValueError(f"{path} is damaged: it has {layers} layers, but hashes of {len(manifest.hashes)} parameters")
    for name in manifest.files:
        if PurePath(name).name != name.removeprefix(f"{TEMPLATES}/"):
            raise ValueError(f"{path} names the file {name!r:.80}, which is not one of its directory")
    return manifest


def _build(config: type, values: dict[str, Any]) -> Any:
    """A config dataclass from JSON; lists become tuples, nested configs dataclasses, and numbers of float fields floats."""
    nested = {"layer": ModelConfig, "rope": RopeConfig}
    built = {name: _build(nested[name], value) if name in nested else value for name, value in values.items()}
    if "storages" in built:
        storages = [(tuple(path), QuantizedAs(**STORAGE.clean("storages", storage))) for path, storage in built["storages"]]
        built["storages"] = tuple(storages)
    built = {name: tuple(value) if isinstance(value, list) else value for name, value in built.items()}
    numbers = {each.name: float(built[each.name]) for each in fields(config) if each.type is float and each.name in built}
    return config(**built | numbers)


def load_converted(
    path: Path,
    config: ModelConfig | HeadConfig,
    dtype: DTypeLike,
    *,
    storing: Storing,
    quantization: str | None,
    placement: Placement,
    progress: bool,
) -> LoadedModel:
    """The model in this dtype, stored as `config_stored_as` chooses, on these devices. On one device, without a cast, its
    arrays are the mapped files; each of several devices reads only its part.

    Raises ValueError naming parameters that are missing, misshapen or can't be read, or as `config_stored_as`.
    """
    log_link(path / PARAMETERS)
    published = abstract_model(config, dtype)
    kept: dict[str, str] = {}
    if storing is Storing.AS_IN_FILE:
        with Checkpoint(path / PARAMETERS) as stored:
            kept = {name: info.dtype.name for name, info in stored.infos.items()}
    model = abstract_model(config_stored_as(published, storing, quantization, kept), dtype)
    before, after = layer_config(config), layer_config(model.config)
    params, expected = dict[Keys, Any](), flatten_dict(model.params)
    mapped = mapped_parameters(path / PARAMETERS, published.params, f"loading {path.name}", progress=progress)
    for layer, views in groupby(mapped, lambda each: each[0][:-1]):
        named = restored_layer(layer, {str(keys[-1]): array for keys, array in views}, before, after)
        arrays: dict[Keys, Any] = {(*layer, name): array for name, array in named.items()}
        if placement == ONE_DEVICE:
            arrays = {keys: jax.device_put(each) if isinstance(each, np.ndarray) else each for keys, each in arrays.items()}
        params |= placement.parameters(arrays, after, expected)
    return build_model(model.config, unflatten_dict(params), dtype, placement.weights)


def head_directory(path: Path) -> Path | None:
    """The head's directory in a converted checkpoint: `draft/` of a target, a head's own directory; None if there is no head.

    Raises ValueError if a target's head is missing or not the one it was converted with.
    """
    manifest = read_manifest(path)
    if manifest.kind != "target":
        return path
    if manifest.draft is None:
        return None
    if not is_converted(path / DRAFT) or manifest_digest(path / DRAFT) != manifest.draft:
        raise ValueError(f"{path} was converted with a draft head, but {DRAFT}/ is missing or another head: convert it again")
    return path / DRAFT


def check_fit(manifest: Manifest, target: ModelConfig) -> None:
    """Raises ValueError if a converted head was made for another target: the layers that it reads depend on the target."""
    for name, expected in manifest.made_for.items():
        if (found := vars(target).get(name)) != expected:
            raise ValueError(
                f"the draft head was converted for a target whose {name} is {expected}, this target's is {found}: "
                "convert the original again for this target"
            )
    if manifest.token_map is not None and max(manifest.token_map, default=0) >= target.vocab_size:
        raise ValueError(f"the draft head's token map names token {max(manifest.token_map)}; the target has {target.vocab_size}")


def stored_arrays(
    path: Path, config: ModelConfig | HeadConfig, *, doing: str, progress: bool = False
) -> Iterator[tuple[tuple[str | int, ...], np.ndarray]]:
    """Every parameter as it is stored, as `mapped_parameters`. `doing` is the first word of the progress bar."""
    expected = abstract_model(config, jnp.float32).params
    return mapped_parameters(path / PARAMETERS, expected, f"{doing} {path.name}", progress=progress)
