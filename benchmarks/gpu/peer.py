"""torch on the same GPU: a decoding step of the same Llama with random weights, beside our plain cycle, and its products."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from jaxspec.checkpoints.exporting import hf_config
from jaxspec.config import ModelConfig

from .lab import Cases, Lab, Skip
from .products import Product, timed

WARM_UP = 3


def cases(lab: Lab) -> Cases:
    """The hand-written one first, and torch.compile, which takes minutes, last."""
    yield {"name": "torch: cuBLAS and SDPA in one CUDA graph"}, partial(time_by_hand, lab)
    yield from timed(lab, {"torch": time_product})
    yield {"name": "transformers: static cache, torch.compile"}, partial(time_transformers, lab)


def torch_and_device(lab: Lab) -> tuple[Any, str]:
    """torch and the device that it is to use. Raises Skip if it is missing, or has no GPU (tiny sizes do without)."""
    try:
        import torch
    except ImportError as error:
        raise Skip(f"{error}: install torch") from error
    if torch.cuda.is_available():
        return torch, "cuda"
    if lab.size.memory_limit is None:
        raise Skip("torch finds no CUDA device")
    return torch, "cpu"


def time_graph(lab: Lab, torch: Any, device: str, call: Callable[[], Any]) -> list[float]:
    """Milliseconds per call, several samples; on a GPU as one CUDA graph, as XLA launches its programs."""
    with torch.no_grad():
        for _ in range(WARM_UP):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                kept = call()  # noqa: F841  the graph writes to it
            call = graph.replay
        return time_calls(lab, torch, device, call)


def time_calls(lab: Lab, torch: Any, device: str, call: Callable[[], Any]) -> list[float]:
    """As `Lab.time`, for torch."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(2):
        started = time.perf_counter()
        call()
        synchronize()
        once = time.perf_counter() - started
    calls, values = max(1, min(1000, round(lab.size.sample_seconds / max(once, 1e-6)))), []
    for _ in range(lab.size.samples):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()
        values.append((time.perf_counter() - started) / calls * 1e3)
    return values


def time_product(lab: Lab, product: Product, way: str, copies: int) -> list[float]:
    """Milliseconds for one product with each of `copies` matrices, as products.time_jax, in one CUDA graph."""
    torch, device = torch_and_device(lab)
    made = [torch.randn(product.k, product.n, device=device, dtype=torch.bfloat16) for _ in range(copies)]
    every = [torch.randn(product.rows, product.k, device=device, dtype=torch.bfloat16) for _ in range(copies)]
    return time_graph(lab, torch, device, lambda: [x @ w for x, w in zip(every, made, strict=True)])


def time_by_hand(lab: Lab) -> dict[str, Any]:
    torch, device = torch_and_device(lab)
    step = decode_step(torch, lab.size.target, lab.size.goal_context, device)
    milliseconds = time_graph(lab, torch, device, step)
    return {"milliseconds": milliseconds, "context": lab.size.goal_context, "versions": versions(torch)}


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


def time_transformers(lab: Lab) -> dict[str, Any]:
    """A static cache, and the forward pass compiled with CUDA graphs. The prompt is prefilled without compiling."""
    torch, device = torch_and_device(lab)
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import transformers
    except ImportError as error:
        raise Skip(f"{error}: install transformers") from error
    transformers.utils.logging.set_verbosity_error()
    torch.set_default_dtype(torch.bfloat16)
    context, config = lab.size.goal_context, transformers.LlamaConfig.from_dict(hf_config(lab.size.target))
    with torch.device(device), torch.no_grad():
        model = transformers.LlamaForCausalLM(config).eval()
        cache = transformers.StaticCache(config=model.config, max_cache_len=context + 1)
        prompt = torch.randint(0, config.vocab_size, (1, context))
        token, position = (
            model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1),
            torch.tensor([[context]]),
        )
        forward = torch.compile(model.forward, mode="reduce-overhead") if device == "cuda" else model.forward

        def step() -> None:
            torch.compiler.cudagraph_mark_step_begin()
            forward(token, position_ids=position, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

        started = time.perf_counter()
        for _ in range(WARM_UP):
            step()
        first = time.perf_counter() - started
        milliseconds = time_calls(lab, torch, device, step)
    found = versions(torch) | {"transformers": transformers.__version__}
    return {"milliseconds": milliseconds, "context": context, "warm_up_seconds": first, "versions": found}


def versions(torch: Any) -> dict[str, Any]:
    return {"torch": torch.__version__, "cuda": torch.version.cuda}
