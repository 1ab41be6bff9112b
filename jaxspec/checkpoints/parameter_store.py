"""A model's parameters as safetensors files, in the model's own layout: a converted checkpoint's, and a training run's.

Parameters are a nested dict of arrays, as modules have them: {"layers": {0: {"mlp": {"kernel": array}}}}. A parameter's name in
the files is its keys joined by dots: `layers.0.mlp.kernel`. Files are mapped; flipped bits are not noticed: there are hashes for
that in the manifest.
"""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from tqdm import tqdm

from jaxspec.checkpoints.checkpoint import Checkpoint


def parameter_name(keys: tuple) -> str:
    """A parameter's name in files, in manifests and in messages.

    In:  ("layers", 0, "mlp", "kernel")
    Out: "layers.0.mlp.kernel"
    """
    return ".".join(map(str, keys))


def load_parameters(directory: Path, expected: dict) -> dict:
    """All parameters of a directory, each straight from its file onto the device.

    Nothing is copied on the host: an accelerator gets its values from the mapped file, and on a CPU the array is the mapped file,
    whose pages are read when they are first used. A cast makes a copy.

    `expected`: nested dict of jax.ShapeDtypeStruct, exactly the parameters that are stored; the jax.Arrays are returned in its
    place. Floating-point values are cast to its `dtype`; others must be stored with it.

    Raises ValueError naming what is missing, unknown, has another shape or dtype, or can't be read.
    """
    leaves, arrays = flatten_dict(expected), mapped_parameters(directory, expected)
    return unflatten_dict({keys: jax.device_put(values).astype(leaves[keys].dtype) for keys, values in arrays})


def mapped_parameters(
    directory: Path, expected: dict, title: str = "", *, progress: bool = False
) -> Iterator[tuple[tuple, np.ndarray]]:
    """Yields every parameter of `expected` by its keys, as it is stored: a view of the mapped file. Raises as `load_parameters`.

    `title` is the label of the progress bar.
    """
    with Checkpoint(directory) as stored:
        check_stored(stored, expected)
        with tqdm(total=stored.size(stored.infos), desc=title, unit="B", unit_scale=True, disable=not progress) as bar:
            for keys in flatten_dict(expected):
                yield keys, stored.read(name := parameter_name(keys))
                bar.update(stored.infos[name].size)


def check_stored(stored: Checkpoint, expected: dict) -> None:
    """Raises ValueError unless the stored parameters match `expected` (jax.ShapeDtypeStructs), up to float dtypes."""
    leaves = {parameter_name(keys): leaf for keys, leaf in flatten_dict(expected).items()}
    missing, unknown = sorted(leaves.keys() - stored.infos.keys()), sorted(stored.infos.keys() - leaves.keys())
    if missing:
        raise ValueError(f"{stored.path} misses {len(missing)} parameters: {', '.join(missing[:5])}")
    if unknown:
        raise ValueError(f"{stored.path} has {len(unknown)} unknown parameters: {', '.join(unknown[:5])}")
    for name, leaf in leaves.items():
        found = stored.infos[name]
        if found.shape != leaf.shape:
            raise ValueError(f"{stored.path}: parameter {name!r} has shape {found.shape}; expected {leaf.shape}")
        castable = jnp.issubdtype(found.dtype, jnp.floating) and jnp.issubdtype(leaf.dtype, jnp.floating)
        if found.dtype != leaf.dtype and not castable:
            raise ValueError(f"{stored.path}: parameter {name!r} has dtype {found.dtype}; expected {leaf.dtype}")
