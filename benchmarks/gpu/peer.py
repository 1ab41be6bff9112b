"""torch on the same GPU: a decoding step of the same Llama with random weights, beside our plain cycle, and its products."""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

from jaxspec.config import ModelConfig

from .lab import Cases, Lab, Skip
from .products import ROWS, matrices

WARM_UP = 3


def cases(lab: Lab) -> Cases:
    """A whole step first."""
    yield {"name": "torch: cuBLAS and SDPA in one CUDA graph"}, partial(time_step, lab)
    for (name, (k, n)), rows in product(matrices(lab).items(), lab.few(ROWS)):
        yield {"matrix": f"{name} {k}x{n}", "rows": rows, "way": "torch"}, partial(time_product, lab, k, n, rows)


def torch_and_device(lab: Lab) -> tuple[Any, str]:
    """torch and the device that it is to use. Raises Skip if it is missing, or has no GPU (tiny sizes do without)."""
    try:
        import torch
    except ImportError as error:
        raise Skip(f"{error}: install torch") from error
    if not torch.cuda.is_available() and lab.size.few is None:
        raise Skip("torch finds no CUDA device")
    return torch, "cuda" if torch.cuda.is_available() else "cpu"


def time_graph(lab: Lab, torch: Any, device: str, call: Callable[[], Any]) -> list[float]:
    """Milliseconds per call, several samples; on a GPU as one CUDA graph, as XLA launches its programs."""
    with torch.no_grad():
        for _ in range(WARM_UP):
            call()
        if device == "cpu":
            return lab.time(call, wait=lambda _: None)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = call()  # noqa: F841  the graph writes to it
        return lab.time(graph.replay, most_calls=1000, wait=lambda _: torch.cuda.synchronize())


def time_product(lab: Lab, k: int, n: int, rows: int) -> dict[str, Any]:
    """Microseconds for a product, as in products.timed, in one CUDA graph."""
    torch, device = torch_and_device(lab)
    nbytes = k * n * lab.dtype.itemsize
    copies = math.ceil(lab.size.copy_bytes / nbytes)
    made = [torch.randn(k, n, device=device, dtype=torch.bfloat16) for _ in range(copies)]
    every = [torch.randn(rows, k, device=device, dtype=torch.bfloat16) for _ in range(copies)]
    milliseconds = time_graph(lab, torch, device, lambda: [x @ w for x, w in zip(every, made, strict=True)])
    return {"microseconds": [1e3 * value / copies for value in milliseconds], "bytes": nbytes}


def time_step(lab: Lab) -> dict[str, Any]:
    torch, device = torch_and_device(lab)
    milliseconds = time_graph(lab, torch, device, decode_step(torch, lab.size.target, lab.size.context, device))
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    return {"milliseconds": milliseconds, "context": lab.size.context, "versions": versions}


def decode_step(torch: Any, config: ModelConfig, context: int, device: str) -> Callable[[], None]:
    """A function that decodes one token greedily. It rewrites the last of `context` slots, so all its shapes are static."""
    functional, heads, kv_heads, dim = torch.nn.functional, config.num_heads, config.num_kv_heads, config.head_dim
    hidden, wide = config.hidden_size, config.intermediate_size

    def weight(*shape: int) -> Any:
        return torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02

    layers = [
        {
            "qkv": weight((heads + 2 * kv_heads) * dim, hidden), "out": weight(hidden, heads * dim),
            "gate_up": weight(2 * wide, hidden), "down": weight(hidden, wide),
            "k": weight(1, kv_heads, context, dim), "v": weight(1, kv_heads, context, dim),
        }
        for _ in range(config.num_layers)
    ]  # fmt: skip
    embedding, head, norm = weight(config.vocab_size, hidden), weight(config.vocab_size, hidden), 1 + weight(hidden)
    cos, sin = weight(dim), weight(dim)
    token = torch.zeros(1, device=device, dtype=torch.long)

    def rotate(x: Any) -> Any:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def normed(x: Any) -> Any:
        return functional.rms_norm(x, (hidden,), norm, config.rms_norm_eps)

    def step() -> None:
        x = embedding[token]
        for layer in layers:
            q, k, v = functional.linear(normed(x), layer["qkv"]).view(1, -1, 1, dim).split((heads, kv_heads, kv_heads), 1)
            layer["k"][:, :, -1:], layer["v"][:, :, -1:] = rotate(k), v
            seen = functional.scaled_dot_product_attention(rotate(q), layer["k"], layer["v"], enable_gqa=True)
            x = x + functional.linear(seen.reshape(1, -1), layer["out"])
            gate, up = functional.linear(normed(x), layer["gate_up"]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, layer["down"])
        token.copy_(functional.linear(normed(x), head).argmax(-1))

    return step
