"""The engine on this device: is its text the CPU's, and how much time does the host add to the device's?"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import jax
import numpy as np

from jaxspec.config import PLAIN, EngineConfig, TreeShape
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationRequest, Request
from jaxspec.load import load_models
from jaxspec.sampling_params import SamplingParams
from jaxspec.text.prompts import encode

from .expected_text import PARAMS, PROMPTS, TOKENS
from .lab import Cases, Lab, Skip

# Text


def texts(lab: Lab) -> Cases:
    """The built-in model with each attention kernel, in float32 as the stored text and in 16 bits as GPUs run it."""
    for dtype, kernel in (*product(("float32", "bfloat16"), ("pallas_triton", "reference")), ("bfloat16", "mosaic")):
        yield {"attention": kernel, "dtype": dtype}, partial(compare_text, lab, kernel, dtype)


def compare_text(lab: Lab, kernel: str, dtype: str) -> dict[str, Any]:
    """How many texts are the stored ones, and how many are those of plain decoding here: that rate is what trees promise."""
    if not lab.on_gpu and (kernel, dtype) != ("reference", "float32"):
        raise Skip("it runs on GPUs only")
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        found = generate_all(kernel, dtype, lab.size.text_trees)
    row: dict[str, Any] = {"prompts": len(PROMPTS)}
    for kind, expected in TOKENS.items():
        texts = {tree.name: found[kind, tree.name] for tree in lab.size.text_trees}
        plain = texts[PLAIN.name]
        row[f"{kind}_same_as_stored"] = {tree: sum(map(equal, got, expected)) for tree, got in texts.items()}
        row[f"{kind}_same_as_plain"] = {tree: sum(map(equal, got, plain)) for tree, got in texts.items()}
        row[f"{kind}_first_difference_of_plain"] = list(map(first_difference, plain, expected))
    return row


def generate_all(kernel: str | None, dtype: str, trees: Sequence[TreeShape]) -> dict[tuple[str, str], list[list[int]]]:
    """Tokens of every prompt, by kind of sampling and tree; one request at a time, so that every program is compiled for one."""
    models = load_models(
        spec=trees[-1], request_trees=trees[:-1], dtype=dtype, attention_kernel=kernel, max_running_requests=1, context_length=256,
        progress=False,
    )  # fmt: skip
    prompts = [tuple(encode(models.tokenizer, prompt)) for prompt in PROMPTS]
    return {
        (kind, tree.name): [generate(models.engine, GenerationRequest(prompt, PARAMS[kind], tree=tree)) for prompt in prompts]
        for kind in TOKENS
        for tree in trees
    }


def generate(engine: Engine, request: GenerationRequest) -> list[int]:
    engine.add(request)
    while engine.has_work:
        for update in engine.step():
            if update.output is not None:
                if update.output.finish_reason == "error":
                    raise RuntimeError(f"the engine could not complete a prompt with {request.tree}")
                tokens = list(update.output.token_ids)
    return tokens


def equal(got: Sequence[int], expected: Sequence[int]) -> bool:
    return list(got) == list(expected)


def first_difference(got: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first token that differs; None: all are equal."""
    return next((place for place, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), None)


# Time


def cases(lab: Lab) -> Cases:
    """The random model with one tree at a time; its engines share the weights."""
    for tree in (lab.size.trees[1], PLAIN):
        for requests in lab.size.engine_requests:
            yield {"tree": tree.name, "requests": requests}, partial(time_engine, lab, tree, requests)


def time_engine(lab: Lab, tree: TreeShape, requests: int) -> dict[str, Any]:
    """Milliseconds per cycle of the engine's two loops, and of launches without reading results, which is the device's own time.

    One engine has both loops, so its programs compile once. The serial loop comes first: it leaves nothing to read.
    """
    engine, running = decoding(lab, tree, requests)
    count = lab.size.engine_cycles
    engine.config = replace(engine.config, overlap=False)
    serial = [time_steps(engine, count) for _ in range(3)]
    engine.config = replace(engine.config, overlap=True)
    time_steps(engine, 3)
    uploads = engine.stats().uploaded_arrays
    samples = [time_steps(engine, count) for _ in range(3)]
    uploads = engine.stats().uploaded_arrays - uploads
    started = time.perf_counter()
    for _ in range(count):
        launched = engine.runner.launch_cycle(running, tree)
    queued = time.perf_counter() - started
    jax.block_until_ready(launched.report)
    own = (time.perf_counter() - started) / count * 1e3
    return {
        "milliseconds": samples,
        "serial_milliseconds": serial,
        "device_milliseconds": own,
        "launch_milliseconds": queued / count * 1e3,
        "host_gap_milliseconds": median(samples) - own,
        "uploaded_arrays_per_step": uploads / (3 * count),
        "context": lab.size.goal_context,
    }


def time_steps(engine: Engine, count: int) -> float:
    """Milliseconds per step."""
    started = time.perf_counter()
    for _ in range(count):
        engine.step()
    return (time.perf_counter() - started) / count * 1e3


def decoding(lab: Lab, tree: TreeShape, count: int) -> tuple[Engine, list[Request]]:
    """An engine in which `count` requests decode, behind contexts of the goal's length."""
    target, head = lab.graphs
    loaded = replace(target, params=lab.params["target"])
    drafts = replace(head, params=lab.params["draft"]) if tree.num_steps else None
    length = lab.size.goal_context + 9 * lab.size.engine_cycles * (tree.num_steps + 1)
    length = min(-(-length // 16) * 16, lab.size.target.max_position_embeddings)
    config = EngineConfig(max_running_requests=count, context_length=length, num_pages=count * length // 16, prefix_cache=False)
    engine = Engine(loaded, drafts, None, tree, config)
    engine.runner.programs.compile_all(engine.runner.table.largest_of_all())
    engine.runner.programs.seal()
    draw = np.random.default_rng(0)
    params = SamplingParams(max_tokens=length - lab.size.goal_context, temperature=0, ignore_eos=True)
    vocabulary = lab.size.target.vocab_size
    prompts = [tuple(draw.integers(0, vocabulary, lab.size.goal_context).tolist()) for _ in range(count)]
    running = [engine.add(GenerationRequest(prompt, params)) for prompt in prompts]
    while not all(request.generated for request in running):
        engine.step()
    time_steps(engine, 3)
    return engine, running
