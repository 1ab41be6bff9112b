"""Loads converted checkpoints: parameters that already have the model's layout, straight onto the devices."""

from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.typing import DTypeLike
from tqdm import tqdm

from jaxspec.checkpoints.manifest import DRAFT, PARAMETERS, Manifest, is_converted, manifest_digest, read_manifest
from jaxspec.checkpoints.parameter_store import check_stored, load_parameters, parameter_name
from jaxspec.config import ModelConfig
from jaxspec.models.head import HeadConfig
from jaxspec.models.registry import LoadedModel, abstract_model


def load_converted(path: Path, config: ModelConfig | HeadConfig, dtype: DTypeLike, *, progress: bool) -> LoadedModel:
    """The model in this dtype. Raises ValueError naming parameters that are missing, misshapen or can't be read."""
    graph, expected = abstract_model(config, dtype)
    return LoadedModel(config, graph, load_parameters(path / PARAMETERS, expected, progress=progress))


def head_directory(path: Path) -> Path | None:
    """Where the head of a converted checkpoint is: in it, if it is a target's; None if it has none.

    Raises ValueError if a target's head is missing or another one.
    """
    manifest = read_manifest(path)
    if manifest.kind != "target":
        return path
    if manifest.draft is None:
        return None
    if not is_converted(path / DRAFT) or manifest_digest(path / DRAFT) != manifest.draft:
        raise ValueError(f"{path} was converted with a draft head, but {DRAFT}/ is missing or another one: convert it again")
    return path / DRAFT


def check_fit(manifest: Manifest, target: ModelConfig) -> None:
    """Raises ValueError if a converted head was made for another target: which layers it reads depends on their number."""
    for name, expected in manifest.made_for.items():
        if vars(target)[name] != expected:
            found = vars(target)[name]
            raise ValueError(
                f"the draft head was converted for a target whose {name} is {expected}, this target's is {found}: "
                "convert the original again for this target"
            )


def mapped_ids(manifest: Manifest) -> np.ndarray | None:
    """The head's token map, int32 target ids, if it was converted with one."""
    return None if manifest.token_map is None else np.asarray(manifest.token_map, np.int32)


def check_parameters(path: Path, config: ModelConfig | HeadConfig) -> None:
    """Raises ValueError unless the parameters of a checkpoint are those of the model, name by name and shape by shape."""
    check_stored(path / PARAMETERS, abstract_model(config, jnp.float32)[1])


def stored_arrays(
    path: Path, config: ModelConfig | HeadConfig, *, doing: str, progress: bool = False
) -> Iterator[tuple[tuple[str | int, ...], np.ndarray]]:
    """Every parameter as it is stored, one after the other, as views of the mapped files. Raises as `load_converted`.

    `doing` is what the progress bar calls it.
    """
    expected = abstract_model(config, jnp.float32)[1]
    stored = check_stored(path / PARAMETERS, expected)
    total = sum(array.size for array in stored.values())
    with tqdm(total=total, desc=f"{doing} {path.name}", unit="B", unit_scale=True, disable=not progress) as bar:
        for keys in flatten_dict(expected):
            found = stored[parameter_name(keys)]
            yield keys, found.values()
            bar.update(found.size)
