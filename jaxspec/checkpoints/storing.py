"""How a model's matrices are stored when it is loaded: as its modules have them; row by row, as files have them; or in 8 or 4 bits.

`Storing` and a quantisation say what is asked for; the `storage` and `storages` of a config say what that means for one model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import Enum
from itertools import groupby
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from jaxspec.checkpoints.checkpoint import Checkpoint
from jaxspec.checkpoints.layout import Keys, Source, Stack, Stacked, TensorPlan
from jaxspec.checkpoints.parameter_store import parameter_name
from jaxspec.checkpoints.quantization import QuantizedStack
from jaxspec.checkpoints.tensor_files import Tensor
from jaxspec.model_config import ModelConfig
from jaxspec.models.head import HeadConfig
from jaxspec.models.linear import Storage, parameters, storage_of
from jaxspec.models.registry import LoadedModel, abstract_model, layer_config
from pallas_kernels.quantized import CPU_BLOCK, InBlocks, QuantizedAs, numbers_of
from pallas_kernels.row_matmul import FORMATS
from pallas_kernels.rows import AsInFile, ByRows
from pallas_kernels.skinny_matmul.packed import Bytes, Nibbles

KEPT = (*FORMATS, "float32", "bfloat16", "float16")
"""Kinds of tensors that may stay as they are with float32 activations: float32 holds all their numbers exactly."""
MATRIX, EMBEDDING = "kernel", "embed_tokens"
"""The last keys of parameters that a storage replaces."""
PACKED = "packed_"
"""The prefix of the last keys of a Quantized's arrays."""


class Storing(Enum):
    """How a model's matrices are stored."""

    DENSE = "as modules have them, in the dtype of activations"
    ROWS = "by rows, in the dtype of activations"
    AS_IN_FILE = "by rows, as the file has them: in 16 bits, or in GGUF's blocks"


def planned(plan: TensorPlan, checkpoint: Checkpoint | None, storing: Storing, quantization: str | None = None) -> TensorPlan:
    """The plan with the storage that `storing` and `quantization` choose for each matrix. Without a checkpoint, as
    when planning for a GPU, no matrix stays as the file has it.

    `quantization`: one of config.QUANTIZATIONS, for all matrices. None: as published. Raises ValueError if they are quantised
    otherwise already.
    """
    storages: list[tuple[Keys, Storage]] = []
    for keys, source in plan.layout.items():
        path = keys[:-1] if keys[-1] == MATRIX else keys
        found = _storage(keys, source, plan, checkpoint, storing, quantization)
        if found is not None:
            storages.append((path, found))
    if storing is Storing.DENSE and not storages:
        return plan
    return replace(plan, config=with_storage(plan.config, None if storing is Storing.DENSE else ByRows(), tuple(storages)))


def _storage(
    keys: Keys, source: Source, plan: TensorPlan, checkpoint: Checkpoint | None, storing: Storing, quantization: str | None
) -> Storage | None:
    """The storage of one parameter, if it differs from the others'."""
    for_cpu = storing is not Storing.DENSE
    if isinstance(source, QuantizedStack):
        if quantization not in (None, source.kind):
            raise ValueError(
                f"the checkpoint is quantised already ({source.scheme.name}): leave out quantization, which is {quantization}"
            )
        return None if source.storage is None else replace(source.storage, for_cpu=for_cpu)
    if not isinstance(source, Stack) or keys[-1] not in (MATRIX, EMBEDDING):
        return None
    is_quantized = any(isinstance(each, QuantizedStack) for each in plan.layout.values())
    if quantization is not None and keys[-1] == MATRIX and not is_quantized:
        return QuantizedAs.default(quantization, *source.columns, for_cpu=for_cpu)
    # The embedding may be the output projection, which is read whole for every token.
    is_output = keys[-1] == EMBEDDING and isinstance(plan.config, ModelConfig) and plan.config.tie_word_embeddings
    if quantization is not None and for_cpu and is_output and source.columns[0] % CPU_BLOCK == 0:
        return InBlocks()
    if storing is Storing.AS_IN_FILE and checkpoint is not None:
        tensors = tuple((sum(rows for rows, _ in group), kind) for kind, group in kinds(source, checkpoint))
        if all(kind in KEPT for _, kind in tensors):
            return AsInFile(tensors)
    return None


def kinds(source: Stack, checkpoint: Checkpoint) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """The tensors of a parameter (rows and kind: dtype or format), with consecutive ones of the same kind grouped."""
    infos = ((rows, checkpoint.infos[name]) for name, rows in source.tensors)
    found = groupby(((rows, info.format or info.dtype.name) for rows, info in infos), key=lambda each: each[1])
    return ((kind, list(group)) for kind, group in found)


def with_storage(config: Any, storage: Storage | None, storages: tuple[tuple[Keys, Storage], ...] = ()) -> Any:
    """The config of the same target or head with this storage: `storages` by path, `storage` elsewhere."""
    if isinstance(config, HeadConfig):
        return replace(config, layer=with_storage(config.layer, storage, storages))
    return replace(config, storage=storage, storages=storages)


def stored(keys: Keys, source: Source, checkpoint: Checkpoint, config: ModelConfig) -> dict[Keys, Any]:
    """The parameter at these keys as the model stores it: its arrays by their keys, in the file's dtypes. What needs no
    conversion is not read yet: it is a view of the file, or Stacked."""
    if not isinstance(source, Stack | QuantizedStack) or keys[-1] not in (MATRIX, EMBEDDING):
        return {keys: source.join(checkpoint.read)}
    path = keys[:-1] if keys[-1] == MATRIX else keys
    storage, named = storage_of(config, *path), dict[str, Any]()
    if isinstance(source, QuantizedStack) and isinstance(storage, QuantizedAs):
        named = parameters(storage.of(source.numbers(checkpoint.read)))
    elif isinstance(source, Stack) and isinstance(storage, AsInFile):
        named = dict(zip(storage.names, _in_file(storage, source, checkpoint), strict=True))
    elif isinstance(source, Stack) and isinstance(storage, QuantizedAs | InBlocks):
        named = parameters(storage(source._replace(is_kernel=False).join(checkpoint.read).T))
    else:  # also what is published quantised, in blocks or groups that don't fit
        view = source.view(checkpoint.view) if isinstance(source, Stack) else source.view(checkpoint.read)
        if keys[-1] == EMBEDDING or not isinstance(storage, ByRows):
            return {keys: view}
        named = {"rows": replace(view, is_transposed=False)}
    return {keys: next(iter(named.values()))} if keys[-1] == EMBEDDING else {(*path, name): each for name, each in named.items()}


def _in_file(storage: AsInFile, source: Stack, checkpoint: Checkpoint) -> Iterator[Stacked]:
    """Stacks of consecutive tensors of the same kind."""
    names = iter(source.tensors)
    for rows, kind in storage.tensors:
        parts = list[Tensor]()
        while rows:
            name, count = next(names)
            parts.append(checkpoint.blocks(name) if kind in FORMATS else checkpoint.view(name))
            rows -= count
        yield Stacked(parts)


def config_stored_as(model: LoadedModel, storing: Storing, quantization: str | None, kept: Mapping[str, str] | None = None) -> Any:
    """The config of a converted checkpoint's model, whose matrices are dense or quantised for a GPU, with the storage that
    `storing` and `quantization` choose for each. Its parameters may be abstract. `kept`: the dtypes in its files, by
    parameter_name.

    Raises ValueError if they are quantised otherwise already.
    """
    layer, for_cpu = layer_config(model.config), storing is not Storing.DENSE
    published: dict[Keys, Any] = dict(layer.storages)
    storages: dict[Keys, Storage] = {path: replace(storage, for_cpu=for_cpu) for path, storage in published.items()}
    if quantization is not None:
        dense = flatten_dict(abstract_model(with_storage(model.config, None), model.dtype).params)
        sizes = {keys[:-1]: len(array) for keys, array in dense.items() if keys[-1] == MATRIX}
        asked = {path: QuantizedAs.default(quantization, size, for_cpu=for_cpu) for path, size in sizes.items()}
        if any(storage.kind != asked[path].kind for path, storage in published.items()):
            raise ValueError(f"the checkpoint is quantised already: leave out quantization, which is {quantization}")
        storages = storages or {**asked}
        if for_cpu and isinstance(model.config, ModelConfig) and layer.tie_word_embeddings and layer.hidden_size % CPU_BLOCK == 0:
            storages[EMBEDDING,] = InBlocks()
    for keys, array in flatten_dict(model.params).items() if storing is Storing.AS_IN_FILE else ():
        kind = (kept or {}).get(parameter_name(keys))
        if keys[-1] in (MATRIX, EMBEDDING) and kind in KEPT:
            is_matrix = keys[-1] == MATRIX
            storages.setdefault(keys[:-1] if is_matrix else keys, AsInFile(((array.shape[is_matrix], kind),)))
    return with_storage(model.config, ByRows() if for_cpu else None, tuple(storages.items()))


def restored_layer(path: Keys, arrays: Mapping[str, Any], before: ModelConfig, after: ModelConfig) -> dict[str, Any]:
    """The parameters of the layer at a path, by their names, converted from the storage of `before` to that of `after`. NumPy's
    arrays may be views of files: what needs no conversion is not read yet."""
    storage = storage_of(after, *path)
    if EMBEDDING in arrays and isinstance(table := storage_of(after, *path, EMBEDDING), InBlocks):
        return dict(arrays) | {EMBEDDING: next(iter(parameters(table(arrays[EMBEDDING].T)).values()))}
    if storage == storage_of(before, *path):
        return dict(arrays)
    others = {name: each for name, each in arrays.items() if name != MATRIX and not name.startswith(PACKED)}
    packed = {name.removeprefix(PACKED): each for name, each in arrays.items() if name.startswith(PACKED)}
    if packed:
        assert isinstance(storage, QuantizedAs)
        numbers = numbers_of(Bytes(**packed) if "rows" in packed else Nibbles(**packed))
        return others | parameters(storage.of(numbers))
    if MATRIX not in arrays:
        return others
    if isinstance(storage, ByRows | AsInFile):
        return others | {"rows": Stacked([np.asarray(arrays[MATRIX])], is_transposed=True)}
    return others | parameters(storage(arrays[MATRIX]))
