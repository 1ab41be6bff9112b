"""Loading: from the names of a model and a draft head to what an engine needs."""

import logging
import math
import sys
import warnings
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.checkpoints.draft_models import check_draft, inherited_quantization, is_draft_model, load_draft
from jaxspec.checkpoints.hub import DEFAULTS, HubOptions, local_path
from jaxspec.checkpoints.loading import load_target, target_model_config
from jaxspec.checkpoints.storing import Storing
from jaxspec.config import EngineConfig
from jaxspec.defaults import (
    BUILT_IN_NAME,
    FROM_TEXT,
    NGRAM,
    SMOLLM2_HEAD,
    SMOLLM2_HEAD_BITS,
    UNASKED,
    default_tree,
    draft_path,
    gpu_dtype,
    model_directory,
)
from jaxspec.engine.engine import Engine
from jaxspec.engine.host_group import ALONE, HostGroup
from jaxspec.engine.program_cache import enable_compilation_cache
from jaxspec.engine.runner import Start
from jaxspec.model_config import DTYPES, QUANTIZATIONS, QUANTIZE_BY, UNQUANTIZED
from jaxspec.models.registry import LoadedHead, LoadedTarget, abstract_model
from jaxspec.placement import Placement, available_devices
from jaxspec.text.tokenizer import Tokenizer, check_same_tokens, load_tokenizer
from jaxspec.tree_shape import PLAIN, TreeLike, TreeShape
from pallas_kernels.row_matmul import what_is_missing

ROW_BYTES = 0.16
"""A row's arithmetic takes as long as reading so many bytes per weight. A further row takes 0.04 of a plain cycle in float32, 0.05
to 0.11 in bfloat16, 0.12 to 0.17 in int8 and 0.18 in 4 bits (SmolLM2, 8 and 32 rows, two cores of an EPYC, 29 November 2026)."""
SMALL_MODEL = 50_000_000
"""In models with fewer weights, rows have no cost for a head without n-grams: checking what pays takes as long as the rows that it
saves. (The built-in model has 12 million: 3/1/4 would be 6% slower. SmolLM2 is 13% faster, from 4-bit blocks.)"""
MOST_ROW_COST = 0.2
"""The row cost of 4-bit weights, which are unpacked once for all rows."""

logger = logging.getLogger(__name__)


@dataclass
class LoadedModels:
    """A target, its draft head and its tokenizer, and how an engine shall run them."""

    name: str
    """As it was given at the start: a path or a name."""
    directory: Path
    """Of the target."""
    target: LoadedTarget
    head: LoadedHead | None
    tokenizer: Tokenizer | None
    tree: TreeShape
    config: EngineConfig
    progress: bool
    """Show progress bars."""
    group: HostGroup = ALONE
    """The other processes that run it, if this one leads them."""

    @property
    def algorithm(self) -> str:
        """Where drafts come from, as --speculative-algorithm calls it."""
        sources = ([self.head.config.algorithm] if self.head else []) + ([NGRAM] if self.config.ngram else [])
        return " + ".join(sources) or "NONE"

    @property
    def trees(self) -> tuple[TreeShape, ...]:
        """The engine's tree, and the others that it measures."""
        return tuple(dict.fromkeys((self.tree, *self.config.adaptive_trees)))

    @cached_property
    def engine(self) -> Engine:
        """Their engine, which is made when it is first asked for. Raises ValueError if the memory is too small, and ProgramError as
        LLM."""
        config, start = with_row_cost(self.config, self.target), Start(self.progress, group=self.group)
        return Engine(self.target, self.head, self.tokenizer, self.tree, config, start=start)

    @property
    def longest(self) -> int:
        """The most tokens that a prompt and its output may have together in the engine: not more than its cache holds."""
        return min(self.engine.context_length, self.engine.stats().total_tokens)


def load_models(
    model: str | Path | None = None,
    draft: str | Path | None = None,
    tree: TreeLike | None = None,
    *,
    token_map: str | Path | None = None,
    dtype: DTypeLike = "auto",
    quantization: str | None = None,
    speculative_draft_model_quantization: str | None = None,
    progress: bool | None = None,
    revision: str | None = None,
    speculative_draft_model_revision: str | None = None,
    download_dir: str | Path | None = None,
    **options,
) -> LoadedModels:
    """The models behind LLM's arguments. Raises ValueError and TypeError as LLM."""
    unknown = sorted(options.keys() - {field.name for field in fields(EngineConfig)})
    if unknown:
        known = ", ".join(field.name for field in fields(EngineConfig))
        raise TypeError(f"LLM has no option {', '.join(unknown)}; options of the engine are: {known}")
    if draft == FROM_TEXT:
        options.setdefault("ngram", True)
    config = EngineConfig(**options)
    of_target = check_quantization("quantization", quantization)
    of_head = check_quantization("speculative_draft_model_quantization", speculative_draft_model_quantization)
    hub = HubOptions(revision, None if download_dir is None else str(download_dir), speculative_draft_model_revision)
    shape = None if tree is None else TreeShape.of(tree)
    available_devices()  # or its error now
    files = find_files(model, draft, shape, token_map, config, hub)
    if files.head is None and speculative_draft_model_quantization is not None:
        raise ValueError("speculative_draft_model_quantization needs a draft head, and there is none: give draft")
    enable_compilation_cache()
    progress = sys.stderr.isatty() if progress is None else progress
    if files.head is not None:
        check_draft(files.head, target_model_config(files.target), files.token_map)
        if is_draft_model(files.head):
            check_same_tokens(files.target, files.head)
    storing = choose_storing(dtype)
    if files.head is not None and speculative_draft_model_quantization is None:
        is_smaller = files.head == SMOLLM2_HEAD and quantization is None and storing is not Storing.DENSE
        of_head = inherited_quantization(files.head, SMOLLM2_HEAD_BITS if is_smaller else of_target)
    chosen = choose_dtype(dtype, files.target)
    placement = Placement.of(config.tp_size)
    target = load_target(files.target, chosen, storing=storing, quantization=of_target, placement=placement, progress=progress)
    head = None
    if files.head is not None:
        how: dict[str, Any] = {"storing": storing, "quantization": of_head, "placement": placement, "progress": progress}
        head = load_draft(files.head, target, token_map=files.token_map, **how)
    tokenizer = load_tokenizer(files.target)
    target = ending_with(target, tokenizer)
    _warn(config, target.config.max_position_embeddings)
    says_nothing = shape is None and draft is None and not (options.keys() & {"adaptive", "ngram"} or config.is_lossy)
    if says_nothing and files.head in UNASKED and jax.default_backend() == "cpu":
        config, shape = replace(config, ngram=True, adaptive=True, adaptive_trees=UNASKED[files.head]), PLAIN
    if shape is None and head is not None:
        shape = default_tree(head.config.algorithm, files.head, head.config.max_steps)
    shape = shape or default_tree(NGRAM if config.ngram else None)
    return LoadedModels(
        BUILT_IN_NAME if model is None else str(model), files.target, target, head, tokenizer, shape, config, progress
    )


class ModelFiles(NamedTuple):
    """The files to load."""

    target: Path
    head: Path | None
    token_map: Path | None


def find_files(
    model: str | Path | None,
    draft: str | Path | None,
    tree: TreeShape | None,
    token_map: str | Path | None,
    config: EngineConfig,
    hub: HubOptions = DEFAULTS,
) -> ModelFiles:
    """The files behind LLM's arguments. Raises ValueError for arguments that contradict each other."""
    if draft == FROM_TEXT and not config.ngram:
        raise ValueError(f"draft={FROM_TEXT!r} and ngram=False contradict each other: leave out one")
    target = model_directory(model, hub)
    may_draft = tree != PLAIN or config.adaptive or any(each.num_steps for each in config.request_trees)
    if not may_draft:
        for name, given in (("token_map", token_map), ("draft", draft), ("ngram", config.ngram or None)):
            if given is not None:
                raise ValueError(f"TreeShape(num_steps=0) drafts nothing: leave out {name}")
    head = draft_path(draft, target, hub) if may_draft and draft != FROM_TEXT else None
    if head is None:
        if tree is not None and tree != PLAIN and not config.ngram:
            raise ValueError(f"the draft tree {tree} needs a draft head, and {model} comes with none: give draft, or ngram=True")
        if token_map is not None:
            raise ValueError(f"the token map {token_map} needs a draft head to work on: give draft")
        if config.head_options:
            raise ValueError(f"{config.head_options[0]} needs a draft head, and there is none: give draft")
        if hub.of_draft.revision is not None:
            raise ValueError("speculative_draft_model_revision needs a draft head, and there is none: give draft")
    return ModelFiles(target, head, None if token_map is None else local_path(token_map, hub.newest))


def ending_with(target: LoadedTarget, tokenizer: Tokenizer | None) -> LoadedTarget:
    """The target, with the tokenizer's end-of-sequence token among its own: a finetuned model's configs may not name it."""
    config, token = target.config, None if tokenizer is None else tokenizer.eos_token_id
    if token is None or token in config.eos_token_ids or token >= config.vocab_size:
        return target
    return replace(target, config=replace(config, eos_token_ids=(*config.eos_token_ids, token)))


def choose_dtype(dtype: DTypeLike, directory: Path) -> jnp.dtype:
    """The dtype of activations, and of weights that are not stored in fewer bits.

    "auto" is float32 on a CPU (XLA's bfloat16 matmuls run 4-16 times slower there) and 16 bits on a GPU: float16 if the
    checkpoint is, else bfloat16.
    """
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if name == "auto":
        if jax.default_backend() == "cpu":
            return jnp.dtype(jnp.float32)
        name = gpu_dtype(target_model_config(directory).dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}; got {name!r}")
    return jnp.dtype(name)


def check_quantization(name: str, value: str | None) -> str | None:
    """One of QUANTIZATIONS, or None. Raises ValueError, naming the option, for anything else."""
    if value is None or value in UNQUANTIZED:
        return None
    if value not in QUANTIZATIONS:
        raise ValueError(f"{name} {QUANTIZE_BY}, got {value!r:.80}")
    return value


def choose_storing(dtype: DTypeLike) -> Storing:
    """How matrices are stored: on a CPU so that pallas_kernels.row_matmul can read them, in fewer bits if the file has them in
    fewer bits and the dtype is "auto"."""
    if jax.default_backend() != "cpu":
        return Storing.DENSE
    if (missing := what_is_missing()) is not None:
        logger.info("matrix products are XLA's, which take up to three times as long as our kernels for CPUs: %s", missing)
        return Storing.DENSE
    return Storing.AS_IN_FILE if isinstance(dtype, str) and dtype == "auto" else Storing.ROWS


def with_row_cost(config: EngineConfig, target: LoadedTarget) -> EngineConfig:
    """With the row cost of a CPU that has our kernels, unless one is given: a plain cycle reads all weights and computes with each
    once, a further row computes again."""
    if config.row_cost is not None or config.is_lossy or jax.default_backend() != "cpu" or what_is_missing() is not None:
        return config
    dense = abstract_model(replace(target.config, storage=None, storages=()), target.dtype)
    weights = sum(math.prod(array.shape) for array in jax.tree.leaves(dense.params))
    stored = sum(array.nbytes for array in jax.tree.leaves(target.params))
    pays = config.ngram or weights >= SMALL_MODEL
    return replace(config, row_cost=min(MOST_ROW_COST, ROW_BYTES * weights / stored) if pays else 0.0)


def _warn(config: EngineConfig, made_for: int) -> None:
    """Warnings about options that work, but may surprise."""
    if config.is_lossy:
        warnings.warn(
            "accept_threshold_single or accept_threshold_acc is below 1: speculation is lossy, it changes what the model says",
            stacklevel=4,
        )
    if config.context_length is not None and config.context_length > made_for:
        warnings.warn(
            f"context_length {config.context_length} is more than the {made_for} tokens that the model was made for: text "
            "beyond that may be poor",
            stacklevel=4,
        )
