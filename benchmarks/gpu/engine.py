"""The engine on this device: is its text the CPU's, and how much time does the host add to the device's?"""

import time
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import jax
import numpy as np

from jaxspec.commands.workbench import count_equal, run
from jaxspec.config import EngineConfig
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationRequest, Request
from jaxspec.load import load_models
from jaxspec.sampling_params import SamplingParams
from jaxspec.text.prompts import encode
from jaxspec.tree_shape import PLAIN, TreeShape

from .expected_text import PARAMS, PROMPTS, TOKENS
from .lab import Cases, Lab

TREES = (PLAIN, TreeShape(3, 1, 4), TreeShape(5, 4, 8))
"""Of the built-in model, whose texts are compared."""

# Text


def texts(lab: Lab) -> Cases:
    """The built-in model with each attention kernel, in float32 as the stored text and in 16 bits as GPUs run it."""
    for dtype, kernel in (*product(("float32", "bfloat16"), ("pallas_triton", "reference")), ("bfloat16", "mosaic")):
        yield {"attention": kernel, "dtype": dtype}, partial(compare_text, lab, kernel, dtype)


def compare_text(lab: Lab, kernel: str, dtype: str) -> dict[str, Any]:
    """How many texts are the stored ones, and how many are those of plain decoding here: that rate is what trees promise.

    One request at a time, so that every program is compiled for one.
    """
    if (kernel, dtype) != ("reference", "float32"):
        lab.need_gpu()
    trees = TREES[:2] if lab.size.few else TREES
    row: dict[str, Any] = {"prompts": len(PROMPTS)}
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        models = load_models(
            tree=trees[-1], request_trees=trees[:-1], dtype=dtype, attention_kernel=kernel, max_running_requests=1,
            context_length=256, progress=False, tp_size=lab.tp,
        )  # fmt: skip
        prompts = [encode(models.tokenizer, prompt) for prompt in PROMPTS]
        for kind, expected in TOKENS.items():
            params = [PARAMS[kind]] * len(prompts)
            found = {tree.name: run(models.engine, prompts, params, tree=tree).tokens for tree in trees}
            row[f"{kind}_same_as_stored"] = {tree: count_equal(tokens, expected) for tree, tokens in found.items()}
            row[f"{kind}_same_as_plain"] = {tree: count_equal(tokens, found[PLAIN.name]) for tree, tokens in found.items()}
    return row


# Time


def cases(lab: Lab) -> Cases:
    """The random model with one tree at a time; its engines share the weights."""
    for tree in (lab.size.trees[1], PLAIN):
        for requests in lab.few((1, 8)):
            yield {"tree": tree.name, "requests": requests}, partial(time_engine, lab, tree, requests)


def time_engine(lab: Lab, tree: TreeShape, requests: int) -> dict[str, Any]:
    """Milliseconds per cycle of the engine's two loops, and of launches without reading results, which is the device's own time.

    One engine has both loops, so its programs compile once. The serial loop comes first: it leaves nothing to read.
    """
    engine, running = decoding(lab, tree, requests)
    engine.config = replace(engine.config, overlap=False)
    serial = [time_steps(engine, lab.size.cycles) for _ in range(3)]
    engine.config = replace(engine.config, overlap=True)
    time_steps(engine, 3)
    samples = [time_steps(engine, lab.size.cycles) for _ in range(3)]
    started = time.perf_counter()
    for _ in range(lab.size.cycles):
        launched = engine.runner.launch_cycle(running, tree)
    queued = (time.perf_counter() - started) / lab.size.cycles * 1e3
    jax.block_until_ready(launched.report)
    own = (time.perf_counter() - started) / lab.size.cycles * 1e3
    return {
        "milliseconds": samples,
        "serial_milliseconds": serial,
        "device_milliseconds": own,
        "launch_milliseconds": queued,
        "host_gap_milliseconds": median(samples) - own,
        "context": lab.size.context,
    }


def time_steps(engine: Engine, count: int) -> float:
    """Milliseconds per step."""
    started = time.perf_counter()
    for _ in range(count):
        engine.step()
    return (time.perf_counter() - started) / count * 1e3


def decoding(lab: Lab, tree: TreeShape, count: int) -> tuple[Engine, list[Request]]:
    """An engine in which `count` requests decode, after contexts of the goal's length."""
    target, head = lab.graphs
    loaded = replace(target, params=lab.params["target"])
    drafts = replace(head, params=lab.params["draft"]) if tree.num_steps else None
    length = lab.size.context + 9 * lab.size.cycles * (tree.num_steps + 1)
    length = min(-(-length // 16) * 16, lab.size.target.max_position_embeddings)
    config = EngineConfig(max_running_requests=count, context_length=length, num_pages=count * length // 16, prefix_cache=False)
    engine = Engine(loaded, drafts, None, tree, replace(config, tp_size=lab.tp))
    engine.runner.programs.compile_all(engine.runner.table.largest_of_all())
    engine.runner.programs.seal()
    draw = np.random.default_rng(0)
    params = SamplingParams(max_tokens=length - lab.size.context, temperature=0, ignore_eos=True)
    vocabulary = lab.size.target.vocab_size
    prompts = [tuple(draw.integers(0, vocabulary, lab.size.context).tolist()) for _ in range(count)]
    running = [engine.add(GenerationRequest(prompt, params)) for prompt in prompts]
    while not all(request.generated for request in running):
        engine.step()
    time_steps(engine, 3)
    return engine, running
