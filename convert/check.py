"""Checks of a converted checkpoint: logits against the original's, bytes against their hashes."""

import warnings
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from convert.converting import file_sha256, sha256
from jaxspec.checkpoints.converted import DRAFT, is_converted, manifest_digest, read_manifest, stored_arrays
from jaxspec.checkpoints.loading import load_head, load_target, target_model_config
from jaxspec.checkpoints.parameter_store import parameter_name
from jaxspec.models.block import BlockHead
from jaxspec.models.layers import AttentionMetadata, causal_metadata
from jaxspec.models.registry import LoadedHead, LoadedTarget

TOKENS = 64


class Difference(NamedTuple):
    """The difference of two checkpoints' logits on the same random tokens."""

    largest: float
    scale: float
    """The largest logit."""

    def __str__(self) -> str:
        return f"largest difference {self.largest:g} on {TOKENS} random tokens (largest logit {self.scale:.3g})"


def compare_targets(original: Path, converted: Path, *, progress: bool = False) -> Difference:
    """Loads both in the converted checkpoint's dtype and compares their logits on the same tokens."""
    dtype = target_model_config(converted).dtype
    before = _target_logits(load_target(original, dtype, progress=progress))
    return _difference(before, _target_logits(load_target(converted, dtype, progress=progress)))


def compare_heads(
    original: Path, converted: Path, target: Path, *, token_map: Path | None = None, progress: bool = False
) -> Difference:
    """Like `compare_targets`, for a head with its target; the original gets the converted head's token map."""
    loaded = load_target(target, target_model_config(target).dtype, progress=progress)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # converting has warned already
        before = _head_logits(loaded, load_head(original, loaded, token_map=token_map, progress=progress))
    return _difference(before, _head_logits(loaded, load_head(converted, loaded, progress=progress)))


def _tokens(vocab_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(vocab_size, size=(1, TOKENS), dtype=np.int32)


def _target_logits(target: LoadedTarget) -> np.ndarray:
    model, tokens = target.merge(target.params), jnp.asarray(_tokens(target.config.vocab_size))
    return np.asarray(model.logits(model(tokens, causal_metadata(1, TOKENS)).hidden))


def _head_logits(target: LoadedTarget, head: LoadedHead) -> np.ndarray:
    model, module, tokens = target.merge(target.params), head.merge(head.params), jnp.asarray(_tokens(target.config.vocab_size))
    rows = causal_metadata(1, TOKENS)
    features = model(tokens, rows, capture=head.config.captured_layers).features
    if isinstance(module, BlockHead):  # the tokens again as a block after the text, where every row sees everything
        all_seen = AttentionMetadata.of_window(TOKENS + rows.positions, jnp.ones((1, TOKENS, 2 * TOKENS), bool))
        metadata, windows = [all_seen] * head.config.layer.num_layers, module.keys_values(features, rows.positions)
        logits = module.logits(module(module.embed(tokens, model), metadata, None, windows), model)
        return np.asarray(logits + module.bias(tokens) if module.is_conditional else logits)
    out = module(module.embed(jnp.roll(tokens, -1, 1), model), module.project(features), rows)
    return np.asarray(module.logits(out.hidden, model))


def _difference(a: np.ndarray, b: np.ndarray) -> Difference:
    return Difference(float(np.abs(a - b).max()), float(np.abs(a).max()))


def check_hashes(directory: Path, *, progress: bool = False) -> list[str]:
    """Compares every file, every parameter and the draft head with the manifest; returns what differs, nothing if all is well.

    Raises ValueError if the directory is not a converted checkpoint or can't be read.
    """
    if not is_converted(directory):
        found = "it has no jaxspec.json" if directory.exists() else "it does not exist"
        raise ValueError(f"{directory} is not a converted checkpoint: {found}")
    manifest = read_manifest(directory)
    wrong = []
    for name, expected in manifest.files.items():
        path = directory / name
        if not path.is_file():
            wrong.append(f"file {name} is missing")
        elif file_sha256(path) != expected:
            wrong.append(f"file {name} has changed")
    for keys, array in stored_arrays(directory, manifest.config, doing="verifying", progress=progress):
        name = parameter_name(keys)
        if sha256(array) != manifest.hashes.get(name):
            wrong.append(f"parameter {name} has changed")
    if manifest.draft is not None:
        if not is_converted(directory / DRAFT):
            wrong.append(f"the draft head, {DRAFT}/, is missing")
        elif manifest_digest(directory / DRAFT) != manifest.draft:
            wrong.append(f"the draft head, {DRAFT}/, is not the one it was converted with")
        else:
            wrong += [f"{DRAFT}: {line}" for line in check_hashes(directory / DRAFT, progress=progress)]
    return wrong
