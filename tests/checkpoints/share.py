"""What a process holds that loads one of four shares of a model: python -m tests.checkpoints.share [CASE ...].

Four processes load their shares of a random model (190 MB, in each kind of file) and compute logits together, over gloo; one more
loads the whole. /proc tells their anonymous memory while they load, above what it was when a tiny model was loaded the same
way. Prints a line per case: shares held at the peak, of the process that held most, and how far the logits are from the whole's.
"""

import argparse
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from jaxspec.commands.replicas import LOOPBACK, free_ports
from jaxspec.host_memory import number
from jaxspec.model_config import ModelConfig

PROCESSES = 4
SIZES: dict[str, int] = dict(
    vocab_size=8192, hidden_size=1024, intermediate_size=2560, num_layers=7, num_heads=16, num_kv_heads=8, head_dim=64
)
WARM: dict[str, int] = SIZES | dict(vocab_size=256, hidden_size=128, intermediate_size=512, num_layers=1, head_dim=32)
TOKENS = np.arange(3, 35)[None]


class Case(NamedTuple):
    """A kind of file, and how its matrices are stored."""

    kind: str
    dtype: str = "bfloat16"
    storing: str = "DENSE"


CASES = {
    "safetensors": Case("safetensors"),
    "safetensors, as on a CPU": Case("safetensors", "float32", "AS_IN_FILE"),
    ".bin": Case("bin"),
    "converted": Case("converted"),
    "converted, cast": Case("converted", "float16"),
    "converted, by rows": Case("converted", "bfloat16", "ROWS"),
    "GGUF, dequantised": Case("gguf"),
    "GGUF, in blocks": Case("gguf", "float32", "AS_IN_FILE"),
}


class Found(NamedTuple):
    """Of one case."""

    share: int
    """Bytes of the parameters on one device."""
    peak: float
    """Shares in anonymous memory, of the process with most."""
    difference: float
    """Of the logits from those of one device that holds all, over their largest."""


# Files


def write(folder: Path, sizes: dict[str, int], kind: str) -> Path:
    """A random model in a kind of file; GGUF and `.bin` are written from the safetensors."""
    from convert.converting import Options, convert_target
    from jaxspec.checkpoints.exporting import hf_config
    from jaxspec.checkpoints.layouts import target_layout
    from jaxspec.checkpoints.writing import write_checkpoint

    directory, origin = folder / kind, folder / "safetensors"
    config = ModelConfig(max_position_embeddings=256, **sizes)
    if directory.exists():
        return directory
    if kind == "safetensors":
        rng, needed = np.random.default_rng(0), {}
        for source in target_layout(config).values():
            needed |= source.needed()
        scales = {name: 1 / each.shape[-1] ** 0.5 for name, each in needed.items()}
        tensors = ((name, scales[name] * rng.standard_normal(each.shape, np.float32)) for name, each in needed.items())
        write_checkpoint(directory, hf_config(config), tensors, dtype="bfloat16")
        return directory
    write(folder, sizes, "safetensors")
    if kind == "converted":
        convert_target(origin, directory, Options())
        return directory
    directory.mkdir()
    (directory / "config.json").write_text((origin / "config.json").read_text())
    {"bin": write_torch, "gguf": write_gguf}[kind](origin, directory)
    return directory


def write_torch(origin: Path, directory: Path) -> None:
    """The tensors as torch.save writes them."""
    from jaxspec.checkpoints.checkpoint import Checkpoint
    from tests.checkpoints.torch_programs import REBUILD_TENSOR, imported, integer, integers, save, state_dict, text, tuple_of

    values, entries = {}, []
    with Checkpoint(origin) as checkpoint:
        for number, name in enumerate(checkpoint.infos):
            array = checkpoint.read(name)
            storage = text("storage"), imported("torch", "BFloat16Storage"), text(str(number)), text("cpu"), integer(array.size)
            strides = np.cumprod([1, *array.shape[:0:-1]])[::-1].tolist()
            place = integer(0), integers(*array.shape), integers(*strides), b"\x89", b"}"
            values[name] = REBUILD_TENSOR + tuple_of(tuple_of(*storage) + b"Q", *place) + b"R"
            entries.append((f"data/{number}", array.tobytes()))
    save(directory / "pytorch_model.bin", state_dict(**values), tuple(entries))


def write_gguf(origin: Path, directory: Path) -> None:
    """A file of architecture llama with matrices in Q8_0, and its index."""
    import gguf

    from jaxspec.checkpoints.checkpoint import Checkpoint
    from jaxspec.checkpoints.gguf_tensors import INDEX, LINK, index_of
    from tests.checkpoints.test_gguf_file import gguf_name

    file, kind = directory / LINK, gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(str(file), "llama")
    with Checkpoint(origin) as checkpoint:
        for name in checkpoint.infos:
            values = checkpoint.read(name).astype(np.float32)
            if values.ndim == 1:
                writer.add_tensor(gguf_name(name), values)
            else:
                writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = {str(each.name): each for each in gguf.GGUFReader(str(file)).tensors}
    (directory / INDEX).write_text(json.dumps(index_of(file, tensors, json.loads((directory / "config.json").read_text()))))


# Processes


def load(case: Case, folder: Path, address: str, processes: int, rank: int) -> None:
    """One process. Says "ready" when a tiny model is loaded, its bytes when the model is; waits for a line after each."""
    import jax
    import jax.numpy as jnp

    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, processes, rank)
    from jaxspec.checkpoints.loading import load_target
    from jaxspec.checkpoints.storing import Storing
    from jaxspec.models.layers import causal_metadata
    from jaxspec.models.linear import Kernels
    from jaxspec.placement import Placement

    how: dict[str, Any] = {"storing": Storing[case.storing], "placement": Placement.of(processes)}
    load_target(folder / "warm" / case.kind, jnp.dtype(case.dtype), **how)
    print("ready", flush=True)
    input()
    target = load_target(folder / "model" / case.kind, jnp.dtype(case.dtype), **how)
    print(how["placement"].nbytes(target.params), flush=True)
    input()

    def logits(params: dict, tokens: Any) -> Any:
        exact = params if case.dtype == "float32" else jax.tree.map(lambda each: each.astype(jnp.float32), params)
        model = replace(target, dtype=jnp.dtype(jnp.float32)).merge(exact, Kernels(devices=processes))
        return model.logits(model(tokens, causal_metadata(*tokens.shape)).hidden)

    run = jax.jit(how["placement"].program(logits, target.params))
    found = np.asarray(run(target.params, how["placement"].put(TOKENS.astype(np.int32))), np.float32)
    if rank == 0:
        np.save(folder / f"{processes}.npy", found)


@contextmanager
def loading(case: str, folder: Path, processes: int) -> Iterator[list[subprocess.Popen]]:
    """The processes of a case; they must end well."""
    address = f"{LOOPBACK}:{free_ports(1)[0]}"
    command = [sys.executable, "-m", "tests.checkpoints.share", case, "--as-one", str(folder), address, str(processes)]
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    with ExitStack() as until_ended:
        started = []
        for rank in range(processes):
            process = subprocess.Popen([*command, str(rank)], env=os.environ | {"JAX_PLATFORMS": "cpu"}, **pipes)
            started.append(until_ended.enter_context(process))
            until_ended.callback(process.kill)
        yield started
        assert [each.wait(300) for each in started] == [0] * processes


def said(process: subprocess.Popen) -> str:
    """Its next line, but for those of gloo."""
    return next(line for line in process.stdout if not line.startswith("[Gloo]")).strip()  # type: ignore[union-attr]


def go_on(processes: list[subprocess.Popen]) -> None:
    for each in processes:
        each.stdin.write("\n")  # type: ignore[union-attr]
        each.stdin.flush()  # type: ignore[union-attr]


def held(process: subprocess.Popen) -> int:
    """Bytes of its anonymous memory now."""
    return 1024 * (number(Path(f"/proc/{process.pid}/status"), r"RssAnon:\s+(\d+) kB") or 0)


def is_silent(process: subprocess.Popen) -> bool:
    """Whether it has not said yet that it has loaded."""
    return not select.select([process.stdout], [], [], 0)[0]


def measure(name: str, folder: Path) -> Found:
    """One case."""
    for sizes, place in ((WARM, "warm"), (SIZES, "model")):
        write(folder / place, sizes, CASES[name].kind)
    found = {}
    for count in (1, PROCESSES):
        with loading(name, folder, count) as processes:
            assert [said(each) for each in processes] == ["ready"] * count
            time.sleep(0.2)
            before = [held(each) for each in processes]
            most = before.copy()
            go_on(processes)
            while any(is_silent(each) for each in processes):
                most = [max(most, held(each)) for most, each in zip(most, processes, strict=True)]
            shares = [int(said(each)) for each in processes]
            go_on(processes)
        found[count] = shares, [peak - start for peak, start in zip(most, before, strict=True)]
    one, several = (np.load(folder / f"{count}.npy") for count in (1, PROCESSES))
    (share, *_), peaks = found[PROCESSES]
    return Found(share, max(peaks) / share, float(np.abs(one - several).max() / np.abs(one).max()))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m tests.checkpoints.share", description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE", help=f"default: all of {'; '.join(CASES)}")
    parser.add_argument("--as-one", nargs=4, metavar=("FOLDER", "ADDRESS", "PROCESSES", "RANK"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.as_one:
        folder, address, processes, rank = options.as_one
        load(CASES[options.cases[0]], Path(folder), address, int(processes), int(rank))
        return
    with TemporaryDirectory() as scratch:
        for name in options.cases or CASES:
            found = measure(name, Path(scratch))
            size = f"a share is {found.share / 2**20:.0f} MiB"
            print(f"{name}: {size}, at most {found.peak:.2f} of it held, logits differ by {found.difference:.0e}", flush=True)


if __name__ == "__main__":
    main()
