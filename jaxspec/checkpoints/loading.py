"""From a path to a model: Hugging Face directories, heads in any dialect, and converted checkpoints alike."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from tqdm import tqdm

from jaxspec.checkpoints.checkpoint import Checkpoint
from jaxspec.checkpoints.heads import algorithm_of, head_plan, settle
from jaxspec.checkpoints.json_files import read_config, read_end_of_sequence
from jaxspec.checkpoints.layout import Path as ParameterPath
from jaxspec.checkpoints.plan import Plan
from jaxspec.checkpoints.targets import is_target, target_plan
from jaxspec.models.loaded import LoadedHead, LoadedTarget, assemble


def load_target(path: Path, dtype: DTypeLike, *, progress: bool = False) -> LoadedTarget:
    """A target. Raises ValueError naming the path and what is missing, unknown, misshapen, damaged or unsupported."""
    with Checkpoint(path) as checkpoint, naming(path):
        plan = planned_target(path, checkpoint)
        plan.check(checkpoint)
        return assemble(plan.config, read_parameters(plan, checkpoint, dtype, progress=progress))


def load_head(path: Path, target: LoadedTarget, *, token_map: Path | None = None, progress: bool = False) -> LoadedHead:
    """A draft head for this target, in the target's dtype.

    Args:
        path: a head's directory or file; a target's directory if the head is inside (MTP).
        target: the loaded target.
        token_map: FR-Spec's list of the tokens worth drafting; a head with its own draft vocabulary warns and ignores it.
        progress: show a progress bar.

    Raises:
        ValueError: the head does not fit the target, or as `load_target`.
    """
    dtype = target.params["embed_tokens"].dtype
    with Checkpoint(path) as checkpoint, naming(path):
        plan = head_plan(checkpoint, read_config(path), target.config)
        plan.check(checkpoint)
        return settle(plan.config, read_parameters(plan, checkpoint, dtype, progress=progress), target, token_map)


def find_head(path: Path) -> str | None:
    """The kind of draft head in a directory, its own or a target's: EAGLE, EAGLE3 or MTP; None: there is none."""
    with Checkpoint(path) as checkpoint:
        return algorithm_of(checkpoint.infos)


def planned_target(path: Path, checkpoint: Checkpoint) -> Plan:
    """The plan for a target's directory. Raises ValueError if it is something else."""
    if not is_target(checkpoint.infos):
        raise ValueError(
            f"this is no target: it has no model.embed_tokens and model.norm, but {', '.join(sorted(checkpoint.infos)[:6])}, ..."
        )
    directory = path if path.is_dir() else path.parent
    return target_plan(read_config(path) | read_end_of_sequence(directory), checkpoint.infos)


def read_parameters(plan: Plan, checkpoint: Checkpoint, dtype: DTypeLike, *, progress: bool) -> dict:
    """The nested dict of arrays. One parameter at a time is in memory twice, never a whole shard."""
    params: dict = {}
    infos = checkpoint.infos
    total = sum(infos[name].dtype.itemsize * int(np.prod(infos[name].shape)) for name in plan.needed())
    with tqdm(total=total, desc=f"loading {checkpoint.path.name}", unit="B", unit_scale=True, disable=not progress) as bar:
        for path, source in plan.layout.items():
            joined = source.join(checkpoint.read)
            put(params, path, to_device(joined, dtype))
            bar.update(joined.nbytes)
    return params


def to_device(array: np.ndarray, dtype: DTypeLike) -> jax.Array:
    """On the default device; floating-point values in this dtype. XLA transposes views faster than NumPy (4 times on 2 cores)."""
    placed = jnp.asarray(array)
    return placed.astype(dtype) if jnp.issubdtype(placed.dtype, jnp.floating) else placed


def put(params: dict, path: ParameterPath, array: jax.Array) -> None:
    """Sets an entry of a nested dict."""
    *outer, last = path
    for key in outer:
        params = params.setdefault(key, {})
    params[last] = array


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Puts the path in front of an error that does not name it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
