"""How fast a checkpoint is converted and loaded, and how much memory that takes, on a synthetic model.

Alternates a plain copy of the files, the conversion, and loading from both kinds of checkpoint; every stage is a process of its
own whose peak of anonymous memory (what is not a mapped file) is sampled. Before each stage the files it reads are dropped from
the page cache, so all of them read the disk.

Example:
    python -m benchmarks.conversion --directory /big/disk
"""

import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from tqdm import tqdm

from benchmarks import record
from benchmarks.engines import BenchmarkError, exit_on_error
from benchmarks.options import BenchmarkParser
from jaxspec.checkpoints.exporting import hf_config
from jaxspec.checkpoints.targets import target_layout
from jaxspec.checkpoints.writing import write_checkpoint
from jaxspec.config import ModelConfig

LLAMA_8B = ModelConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    max_position_embeddings=131072, dtype="bfloat16",
)  # fmt: skip
SHARD_BYTES = 4 << 30
BLOCK = 16 << 20


class Measured(NamedTuple):
    """One stage."""

    seconds: float
    peak_bytes: int
    """Most anonymous memory of the process at any time."""
    idle_bytes: int
    """Anonymous memory before the stage, modules loaded."""


def make_model(directory: Path, config: ModelConfig) -> None:
    """A checkpoint with random weights, in shards of 4 GiB."""
    generator = np.random.default_rng(0)
    needed = {name: need.shape for source in target_layout(config).values() for name, need in source.needed().items()}

    def tensors():
        for name, shape in tqdm(needed.items(), desc="making the model", unit="tensor"):
            bits = np.frombuffer(generator.bytes(2 * int(np.prod(shape))), np.uint16)
            yield name, ((bits & 0x807F) | 0x3C00).view(ml_dtypes.bfloat16).reshape(shape)  # +-[0.0078, 0.0156), no NaN

    write_checkpoint(directory, hf_config(config) | {"torch_dtype": "bfloat16"}, tensors(), shard_bytes=SHARD_BYTES)


def copy(source: Path, output: Path) -> None:
    """The files one after the other in large blocks, on the disk when it returns: what converting is compared with."""
    output.mkdir()
    for path in sorted(source.iterdir()):
        with path.open("rb") as read, (output / path.name).open("wb") as write:
            shutil.copyfileobj(read, write, BLOCK)
            write.flush()
            os.fsync(write.fileno())


def convert(source: Path, output: Path) -> None:
    from convert.converting import Options, convert_target

    convert_target(source, output, Options())


def load(source: Path, _: Path) -> None:
    import jax

    from jaxspec.checkpoints.loading import load_target

    for array in jax.tree.leaves(load_target(source, "bfloat16").params):
        np.asarray(array).reshape(-1)[:: 4096 // array.dtype.itemsize].sum()  # what is mapped is loaded when its pages are


STAGES: dict[str, Callable[[Path, Path], None]] = {"copy": copy, "convert": convert, "load original": load, "load converted": load}


def run_stage(name: str, source: Path, output: Path) -> Measured:
    """Runs a stage in a process of its own."""
    drop_from_page_cache(source)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_stage_process, args=(name, source, output, sender))
    process.start()
    sender.close()
    try:
        measured = receiver.recv()
    except EOFError:
        raise RuntimeError(f"the stage {name!r} ended without a result: see its error above") from None
    process.join()
    return measured


def _stage_process(name: str, source: Path, output: Path, sender: Any) -> None:
    import jaxspec.checkpoints.loading  # noqa: F401 - both, so that their modules count as idle

    idle = peak = anonymous_bytes()
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, anonymous_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    started = time.perf_counter()
    STAGES[name](source, output)
    seconds = time.perf_counter() - started
    done.set()
    sampler.join()
    sender.send(Measured(seconds, peak, idle))


def anonymous_bytes() -> int:
    """Resident memory of this process that no file backs."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def drop_from_page_cache(directory: Path) -> None:
    """So that the next reader reads the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def total_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def measure(directory: Path, config: ModelConfig, repeats: int) -> dict[str, Any]:
    """All stages, `repeats` times."""
    original, copied, converted = directory / "original", directory / "copied", directory / "converted"
    if not original.exists():
        make_model(original, config)
    size = total_bytes(original)
    rounds = []
    for number in range(repeats):
        for place in (copied, converted):
            shutil.rmtree(place, ignore_errors=True)
        places = {"copy": (original, copied), "convert": (original, converted), "load original": (original, original)}
        places["load converted"] = (converted, converted)
        times = {}
        for name, (source, output) in places.items():
            times[name] = run_stage(name, source, output)
            print(
                f"round {number + 1}: {name:<15} {times[name].seconds:7.1f} s, peak {times[name].peak_bytes / 1e9:6.2f} GB",
                flush=True,
            )
            shutil.rmtree(copied, ignore_errors=True)
        rounds.append({name: measured._asdict() for name, measured in times.items()})
    return {"bytes": size, "rounds": rounds}


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Speed, ratio to the copy of the same round, peak memory; a figure per round."""
    rounds, rows = results["rounds"], []
    for name in rounds[0]:
        speeds = ", ".join(f"{results['bytes'] / stages[name]['seconds'] / 1e9:.2f}" for stages in rounds)
        ratios = ", ".join(f"{stages['copy']['seconds'] / stages[name]['seconds']:.2f}" for stages in rounds)
        peak = max(stages[name]["peak_bytes"] for stages in rounds)
        rows.append([name, speeds, ratios, f"{peak / 1e9:.2f} GB"])
    return {"stages": record.table(["stage", "GB/s", "of the copy's speed", "peak memory"], rows)}


def main(argv: list[str] | None = None) -> int:
    parser = BenchmarkParser("conversion", __doc__)
    parser.add_argument(
        "--directory", type=Path, required=True, help="where the synthetic model lies; it takes three times its size"
    )
    parser.add_argument("--layers", type=int, default=32, help="of the 8B model's layers (default: all 32, 16 GB)")
    parser.add_argument("--repeats", type=int, default=2, help="rounds (default: %(default)s)")
    options = parser.parse(argv)
    if not sys.platform.startswith("linux"):
        raise BenchmarkError("this benchmark reads /proc: it needs Linux")
    options.directory.mkdir(parents=True, exist_ok=True)
    result = measure(options.directory, replace(LLAMA_8B, num_layers=options.layers), options.repeats)
    print(tables(result)["stages"])
    record.write("conversion", options, None, result)
    return 0


if __name__ == "__main__":
    exit_on_error(main)
