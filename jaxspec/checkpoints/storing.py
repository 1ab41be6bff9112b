"""How a model's matrices are stored when it is loaded: as its modules have them, or row by row, as files have them.

`Storing` is what is asked for, a config with `storage` and `storages` what it means for one model.
"""

from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from itertools import groupby
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxspec.checkpoints.checkpoint import Checkpoint
from jaxspec.checkpoints.layout import Keys, Source, Stack, TensorPlan
from jaxspec.checkpoints.tensor_files import own_copy, transposed
from jaxspec.config import ModelConfig
from jaxspec.models.head import HeadConfig
from jaxspec.models.linear import Storage, parameters, storage_of
from jaxspec.models.registry import LoadedModel
from pallas_kernels.row_matmul import FORMATS
from pallas_kernels.rows import AsInFile, ByRows, Rows

KEPT = (*FORMATS, "float32", "bfloat16", "float16")
"""Kinds of tensors that may stay as they are beside float32 activations: all their numbers are float32 numbers."""
MATRIX, EMBEDDING = "kernel", "embed_tokens"
"""The last keys of parameters that a storage replaces."""


class Storing(Enum):
    """How a model's matrices are stored."""

    DENSE = "as modules have them, in the dtype of activations"
    ROWS = "by rows, in the dtype of activations"
    AS_IN_FILE = "by rows, as the file has them: in 16 bits, or in GGUF's blocks"


def planned(plan: TensorPlan, checkpoint: Checkpoint, storing: Storing) -> TensorPlan:
    """The plan of a model that is stored so."""
    if storing is Storing.DENSE:
        return plan
    storages = []
    for keys, source in plan.layout.items() if storing is Storing.AS_IN_FILE else ():
        if isinstance(source, Stack) and keys[-1] in (MATRIX, EMBEDDING):
            tensors = tuple((sum(rows for rows, _ in group), kind) for kind, group in kinds(source, checkpoint))
            if all(kind in KEPT for _, kind in tensors):
                storages.append((keys[:-1] if keys[-1] == MATRIX else keys, AsInFile(tensors)))
    return replace(plan, config=with_storage(plan.config, ByRows(), tuple(storages)))


def kinds(source: Stack, checkpoint: Checkpoint) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """The tensors of a parameter, those of one kind that follow each other together: rows and kind (dtype or format)."""
    found = []
    for name, rows in source.tensors:
        info = checkpoint.infos[name]
        found.append((rows, info.format or info.dtype.name))
    return ((kind, list(group)) for kind, group in groupby(found, key=lambda each: each[1]))


def with_storage(config: Any, storage: Storage, storages: tuple[tuple[Keys, Storage], ...] = ()) -> Any:
    """The config of the same target or head, stored so."""
    if isinstance(config, HeadConfig):
        return replace(config, layer=with_storage(config.layer, storage, storages))
    return replace(config, storage=storage, storages=storages)


def on_device(array: np.ndarray) -> jax.Array:
    """The array, copied once at most."""
    return jax.device_put(own_copy(array))


def stored(keys: Keys, source: Source, checkpoint: Checkpoint, config: ModelConfig) -> dict[Keys, jax.Array]:
    """The parameter at these keys as the model stores it: its arrays by their keys, in the file's dtypes."""
    if not isinstance(source, Stack) or keys[-1] not in (MATRIX, EMBEDDING):
        return {keys: on_device(source.join(checkpoint.read))}
    path = keys[:-1] if keys[-1] == MATRIX else keys
    storage = storage_of(config, *path)
    if isinstance(storage, AsInFile):
        arrays, names = [], iter(source.tensors)
        for rows, kind in storage.tensors:
            parts = []
            while rows:
                name, count = next(names)
                parts.append(checkpoint.blocks(name) if kind in FORMATS else checkpoint.read(name))
                rows -= count
            arrays.append(on_device(parts[0] if len(parts) == 1 else np.concatenate(parts)))
        weight = storage.of(arrays)
    elif keys[-1] == MATRIX and isinstance(storage, ByRows):
        weight = Rows(on_device(source.stacked(checkpoint.read)))
    else:
        return {keys: on_device(source.join(checkpoint.read))}
    named = parameters(weight)
    return {keys: next(iter(named.values()))} if keys[-1] == EMBEDDING else {(*path, name): each for name, each in named.items()}


def by_rows(model: LoadedModel) -> LoadedModel:
    """A dense model, stored row by row."""
    params = {}
    for keys, array in flatten_dict(model.params).items():
        if keys[-1] == MATRIX:
            for name, each in parameters(Rows(on_device(transposed(np.asarray(array))))).items():
                params[*keys[:-1], name] = each
        else:
            params[keys] = array
    return replace(model, config=with_storage(model.config, ByRows()), params=unflatten_dict(params))
