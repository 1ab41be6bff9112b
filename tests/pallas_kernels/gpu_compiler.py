"""Compiles kernels for a GPU that is not there: `python -m tests.pallas_kernels.gpu_compiler h100`, one line of JSON per kernel.

Triton's kernels fail to compile here if they spill registers. Mosaic's are compiled apart; with MOSAIC_GPU_DUMP_PTXAS=1 their
spills are printed. Sizes are Llama-3.1-8B's unless said.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.planner.compile import read_launches
from jaxspec.planner.worker import gpus
from pallas_kernels.cache_write import cache_write
from pallas_kernels.cutoff import cutoff
from pallas_kernels.fp8 import Scales
from pallas_kernels.product import Product
from pallas_kernels.quantized import QuantizedAs
from pallas_kernels.rms_norm import add_norm, norm_pair, rms_norm
from pallas_kernels.rotate_qkv import QkvLayout, rotate_qkv
from pallas_kernels.skinny_matmul import SwiGlu, skinny_matmul
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.weight import Dense
from tests.pallas_kernels.issue_cycles import read_programs

BF16, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE = jnp.bfloat16, 32, 8, 128, 4096, 14336


class Kernel(NamedTuple):
    """A call to compile."""

    name: str
    function: object
    shapes: tuple


def shape(*sizes: int, dtype=BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def attention(
    implementation: str,
    b: int,
    w: int,
    *,
    s: int | None = None,
    page: int = 64,
    heads: tuple[int, int] = (HEADS, KV_HEADS),
    head_dim: int = HEAD_DIM,
    dtype=BF16,
    context: int = 8192,
    fp8: bool = False,
) -> Kernel:
    """w rows of b sequences over a context; s window keys, as many as rows by default. `fp8`: keys and values of 8 bits, scaled."""
    s, table = s or w, context // page
    integers = [shape(b, *more, dtype=jnp.int32) for more in ((table,), (), ())]
    stored = jnp.uint8 if fp8 else dtype
    pages = shape(b * table, page, heads[1], head_dim, dtype=stored)
    window, q = shape(b, s, heads[1], head_dim, dtype=stored), shape(b, w, heads[0], head_dim, dtype=dtype)
    scales = (Scales(*[shape(heads[1], dtype=jnp.float32)] * 2),) if fp8 else ()
    shapes = (q, pages, pages, *integers, window, window, shape(b, w, s, dtype=bool), *scales)
    name = f"{implementation} attention, batch {b}, {w} x {s}, page {page}, heads {heads}, head_dim {head_dim}, {jnp.dtype(dtype)}"
    name += ", 8-bit cache" * fp8
    return Kernel(name, partial(tree_attention, implementation=implementation), shapes)


def triton_kernels() -> Iterator[Kernel]:
    decoding = [(1, 1), (8, 1), (1, 8), (8, 8), (1, 32), (8, 64)]
    yield from (attention("pallas_triton", b, w, page=page) for b, w in decoding for page in (16, 64))
    yield attention("pallas_triton", 1, 4, s=20)  # a draft level
    yield from (attention("pallas_triton", 1, chunk) for chunk in (256, 2048))
    yield from (attention("pallas_triton", 1, w, head_dim=size) for size in (64, 80, 96, 256) for w in (1, 64, 256))
    for heads in ((28, 4), (32, 32), (8, 1)):  # Qwen2-7B, Llama-2-7B, and one KV head
        yield from (attention("pallas_triton", 1, w, heads=heads, dtype=jnp.float16) for w in (1, 8))
    yield from (attention("pallas_triton", b, w, fp8=True) for b, w in ((1, 1), (8, 8), (1, 32), (1, 256)))
    yield from (attention("pallas_triton", 1, 256, head_dim=size, fp8=True) for size in (64, 80, 256))
    for rows in (1, 32, 2048):
        norms = (partial(each, eps=1e-5, implementation="pallas_triton") for each in (rms_norm, norm_pair, add_norm))
        norm, pair, add = norms
        yield Kernel(f"rms_norm, {rows} rows", norm, (shape(1, rows, HIDDEN), shape(HIDDEN)))
        yield Kernel(f"norm_pair, {rows} rows", pair, (*[shape(1, rows, HIDDEN)] * 2, *[shape(HIDDEN)] * 2))
        for k in (HIDDEN, INTERMEDIATE):
            product = Product(shape(1, rows, k), Dense(shape(k, HIDDEN)))
            yield Kernel(f"add_norm, {rows} rows, {k} wide", add, (shape(1, rows, HIDDEN), product, shape(HIDDEN)))
    for rows, rough in ((8, False), (256, False), (4, True)):
        cut = partial(cutoff, rough=rough, implementation="pallas_triton")
        limits = [shape(rows, dtype=kind) for kind in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)]
        shapes = (shape(rows, 128256, dtype=jnp.float32), *limits)
        yield Kernel(f"cutoff, {rows} rows{', rough' * rough}", cut, shapes)
    yield from skinny_kernels()
    yield from packed_kernels()
    for eps in (None, 1e-6):
        layout = QkvLayout(HEADS, KV_HEADS, HEAD_DIM, eps)
        where = shape(1, 8, dtype=jnp.int32), shape(HEAD_DIM // 2, dtype=jnp.float32)
        norms = None if eps is None else (shape(HEAD_DIM), shape(HEAD_DIM))
        rotate = partial(rotate_qkv, layout=layout, implementation="pallas_triton")
        yield Kernel(f"rotate_qkv, norms {eps}", rotate, (shape(1, 8, 48 * HEAD_DIM), *where, norms))
        for bias in (None, shape(48 * HEAD_DIM)):
            product = Product(shape(1, 8, HIDDEN), Dense(shape(HIDDEN, 48 * HEAD_DIM)), bias)
            name = f"rotate_qkv, norms {eps}, with its product and {'no' if bias is None else 'a'} bias"
            yield Kernel(name, rotate, (product, *where, norms))
    scales = Scales(*[shape(KV_HEADS, dtype=jnp.float32)] * 2)
    narrow = QkvLayout(HEADS, KV_HEADS, HEAD_DIM, 1e-6, fp8=True)

    def rotate_to_bytes(qkv, positions, frequencies, norms, scales):
        return rotate_qkv(qkv, positions, frequencies, norms, narrow, scales, implementation="pallas_triton")

    norms = shape(HEAD_DIM), shape(HEAD_DIM)
    where = shape(1, 8, dtype=jnp.int32), shape(HEAD_DIM // 2, dtype=jnp.float32)
    yield Kernel("rotate_qkv, 8-bit cache", rotate_to_bytes, (shape(1, 8, 48 * HEAD_DIM), *where, norms, scales))
    sizes = ((1, 8, 6), (32, 8, 6), (80, 8, 6), (32, 32, 6), (40, 40, 6), (1, 8, 256))
    for layers, kv_heads, rows, stored in (*((*each, BF16) for each in sizes), (32, 8, 6, jnp.uint8)):
        pages = (shape(64, 64, kv_heads, HEAD_DIM, dtype=stored),) * (2 * layers)
        arrays = pages, (shape(1, rows, kv_heads, HEAD_DIM, dtype=stored),) * (2 * layers)
        kinds = ((64, jnp.int32), (rows, jnp.int32), (rows, jnp.int32), (rows, bool))
        places = [shape(1, size, dtype=dtype) for size, dtype in kinds]
        write = partial(cache_write, implementation="pallas_triton")
        name = f"cache_write, {layers} layers, {kv_heads} KV heads, {rows} rows{', 8-bit cache' * (stored != BF16)}"
        yield Kernel(name, write, (*arrays, *places))


def skinny_kernels() -> Iterator[Kernel]:
    """The products of a layer and the output projection, and one of odd sizes."""
    name, multiply = "skinny_matmul", partial(skinny_matmul, implementation="pallas_triton")
    yield Kernel(f"{name}, projection", multiply, (shape(1, HIDDEN), shape(HIDDEN, 48 * HEAD_DIM)))
    for rows, k in ((8, HIDDEN), (16, INTERMEDIATE)):
        yield Kernel(f"{name}, {rows} x {k}", multiply, (shape(rows, k), shape(k, HIDDEN)))
    yield Kernel(f"{name}, SwiGLU", multiply, (shape(4, HIDDEN), shape(HIDDEN, 2 * INTERMEDIATE), SwiGlu()))
    yield Kernel(f"{name}, logits", multiply, (shape(1, HIDDEN), shape(HIDDEN, 128256)))
    yield Kernel(f"{name}, odd", multiply, (shape(5, 4095), shape(4095, 1001)))


def packed_kernels() -> Iterator[Kernel]:
    """Weights of 8 and 4 bits, for few rows and for prefill."""
    multiply = partial(skinny_matmul, implementation="pallas_triton")
    storages = {
        "int8": QuantizedAs("int8"), "FP8": QuantizedAs("fp8"), "FP8 in blocks": QuantizedAs("fp8", 128),
        "int4": QuantizedAs("int4", 128, has_zeros=True), "int4 in small groups": QuantizedAs("int4", 32),
    }  # fmt: skip
    for name, storage in storages.items():
        weight = jax.eval_shape(storage, shape(HIDDEN, 2 * INTERMEDIATE)).packed
        yield Kernel(f"skinny_matmul, {name}, SwiGLU", multiply, (shape(8, HIDDEN), weight, SwiGlu()))
        for rows in (4, 256):
            yield Kernel(f"skinny_matmul, {name}, {rows} rows", multiply, (shape(rows, HIDDEN), weight))


def mosaic_kernels() -> Iterator[Kernel]:
    yield from (attention("mosaic", b, w, page=page) for b, w, page in ((1, 1, 64), (1, 8, 16), (8, 8, 64), (1, 32, 64)))
    yield attention("mosaic", 1, 256)
    yield attention("mosaic", 1, 8, head_dim=64)


def main(gpu: str) -> None:
    described = gpus(gpu, 1)
    # By default XLA makes graphs of five launches or more.
    options = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True, "xla_gpu_graph_min_graph_size": 1}
    for kernel in (*triton_kernels(), *(mosaic_kernels() if gpu == "h100" else ())):
        shapes = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=described.whole), kernel.shapes)
        dumps_ptx = kernel.name.startswith("cutoff")
        with jax.set_mesh(described.mesh), tempfile.TemporaryDirectory() as dump:
            lowered = jax.jit(kernel.function).trace(*shapes).lower(lowering_platforms=("cuda",))
            try:
                dumped = {"xla_dump_to": dump} | ({"xla_dump_emitter_re": ".*"} if dumps_ptx else {})
                lowered.compile(compiler_options=options | dumped)
            except jax.errors.JaxRuntimeError as error:
                print(json.dumps({"name": kernel.name, "error": str(error)[-500:]}), flush=True)
                continue
            found = read_launches(Path(dump))
            programs = read_programs(Path(dump)) if dumps_ptx else {}
        launches = [launch.kernel or launch.kind for launch in found]
        in_graph = all(launch.in_graph for launch in found)
        answer = {"name": kernel.name, "launches": launches, "in_graph": in_graph, "programs": programs}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
