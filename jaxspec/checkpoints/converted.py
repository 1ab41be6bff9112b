"""Loads converted checkpoints: parameters that already have the model's layout, straight onto the devices."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from jaxspec.checkpoints.manifest import DRAFT, PARAMETERS, Manifest, is_converted, read_manifest
from jaxspec.checkpoints.parameter_store import load_parameters, stored_parameters, stream_parameters
from jaxspec.config import ModelConfig
from jaxspec.models.head import HeadConfig
from jaxspec.models.loaded import LoadedModel, abstract


def load_converted(path: Path, config: ModelConfig | HeadConfig, dtype: DTypeLike, *, progress: bool) -> LoadedModel:
    """The model in this dtype. Raises ValueError naming parameters that are missing, misshapen or can't be read."""
    graph, expected = abstract(config, dtype)
    return LoadedModel(config, graph, load_parameters(path / PARAMETERS, expected, progress=progress))


def converted_head(path: Path) -> Path | None:
    """Where the head of a converted checkpoint is: in it, if it is a target's; None if it has none."""
    if read_manifest(path).kind != "target":
        return path
    return path / DRAFT if is_converted(path / DRAFT) else None


def check_fit(manifest: Manifest, target: ModelConfig) -> None:
    """Raises ValueError if a converted head was made for another target: which layers it reads depends on their number."""
    for name, expected in manifest.made_for.items():
        if vars(target)[name] != expected:
            raise ValueError(
                f"the draft head was converted for a target whose {name} is {expected}, this target's is {vars(target)[name]}"
            )


def mapped_ids(manifest: Manifest) -> np.ndarray | None:
    """The head's token map, int32 target ids, if it was converted with one."""
    return None if manifest.token_map is None else np.asarray(manifest.token_map, np.int32)


def stored_arrays(
    path: Path, config: ModelConfig | HeadConfig, *, progress: bool = False
) -> Iterator[tuple[tuple[str | int, ...], np.ndarray]]:
    """Every parameter as it is stored, one after the other, on the host. Raises as `load_converted`."""
    _, expected = abstract(config, jnp.float32)
    stored = stored_parameters(path / PARAMETERS)
    shapes = {
        keys: jax.ShapeDtypeStruct(leaf.shape, stored[name].dtype if (name := ".".join(map(str, keys))) in stored else leaf.dtype)
        for keys, leaf in flatten_dict(expected).items()
    }
    for keys, array in stream_parameters(path / PARAMETERS, unflatten_dict(shapes), progress=progress):
        yield keys, np.asarray(array)
