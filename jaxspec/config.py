"""How the engine runs (EngineConfig).

A wrong value raises ValueError at construction; the message names the field and says what to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real

from jaxspec.checks import require_least, require_one_of
from jaxspec.tree_shape import TreeShape

FP8 = "fp8_e4m3"
KV_CACHE_DTYPES = ("auto", FP8)
"""How keys and values are stored: as the activations are, or in 8 bits (pallas_kernels/fp8.py)."""
ATTENTION_KERNELS = ("reference", "pallas_triton", "mosaic")
"""Implementations of pallas_kernels.tree_attention."""
MATMULS = ("auto", "xla", "skinny")
"""What computes matrix products: pallas_kernels.row_matmul on CPUs that have it and XLA elsewhere; XLA everywhere; or, on
GPUs, pallas_kernels.skinny_matmul for those of at most 16 rows. With "auto" it also computes all with weights of 8 and 4 bits."""


LONGEST_MATCH = 64
"""Most tokens that n-gram drafts compare."""

_KINDS: dict[type, tuple[type, str]] = {
    int: (Integral, "a whole number"), float: (Real, "a number"), bool: (bool, "True or False"), str: (str, "a string")
}  # fmt: skip
"""By the type of a field: what it accepts, and how messages call that."""
_POSITIVE = (
    "tp_size",
    "max_running_requests",
    "page_size",
    "num_pages",
    "prefill_chunk",
    "max_waiting_requests",
    "draft_window_size",
    "ngram_min_match",
    "ngram_max_match",
)


MAX_SLOTS = 2**31
"""Slots have numbers of 32 bits."""


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs: sizes of the cache, batch and prefill chunks, and how it speculates."""

    max_running_requests: int = 8
    """Requests that decode together, at most; the rest wait."""
    context_length: int | None = None
    """Longest sequence, prompt and output together, in tokens. None: the model's own."""
    page_size: int = 16
    """Tokens per page of the cache."""
    kv_cache_dtype: str = "auto"
    """One of KV_CACHE_DTYPES: auto is the dtype of the weights, fp8_e4m3 takes 8 bits per number."""
    draft_kv_cache_dtype: str | None = None
    """How the draft head's cache is stored. None: as the target's."""
    num_pages: int | None = None
    """Pages of the cache. None: enough for every running request at full length, or as many as fit."""
    mem_fraction: float = 0.85
    """Share of the memory for weights and cache, on a GPU of what JAX manages, on a CPU of what is available at the start; the rest
    is for temporaries."""
    prefill_chunk: int = 256
    """Prompt tokens computed per engine step, at most, over all requests."""
    prefix_cache: bool = True
    """Keep the pages of finished requests, so that later prompts with the same beginning reuse them."""
    max_waiting_requests: int | None = None
    """Requests that wait, at most; further ones are refused. None: any number."""
    adaptive: bool = False
    """Choose the draft tree, or plain decoding, before each cycle by measured speed, so that drafts never slow decoding much."""
    adaptive_trees: tuple[TreeShape, ...] = ()
    """What an adaptive engine chooses from, beside its own tree and plain decoding. (): a chain of three steps, and
    two trees more if a head is merged with n-grams (engine/trees.py). Like request_trees, given in any way that TreeShape.of
    takes."""
    request_trees: tuple[TreeShape, ...] = ()
    """Further trees, which single requests may ask for; TreeShape(num_steps=0) lets them turn speculation off."""
    ngram: bool = False
    """Draft what followed the text's last tokens where they stood before, merged with the draft head's tree if there is one."""
    ngram_min_match: int = 1
    """Tokens of such a match, at least."""
    ngram_max_match: int = 12
    """Tokens that are compared for it, at most."""
    ngram_share: int = 0
    """Megabytes of host memory for texts that requests have generated, which n-gram drafts of others may continue. 0: none."""
    draft_window_size: int | None = None
    """The draft head sees this many of the newest tokens only. None: all."""
    draft_sink_size: int = 0
    """Beside that window, the draft head sees the pages that hold this many first tokens."""
    row_cost: float | None = None
    """Time that one more node takes in the target's pass, as a share of a plain cycle's; drafts that are less likely are not
    verified. None: on CPUs by the bits of the weights (docs/serving.md), elsewhere 0: all are."""
    accept_threshold_single: float = 1.0
    """Below 1 speculation is LOSSY, it changes what the model says: a draft is accepted if the target gives it this probability."""
    accept_threshold_acc: float = 1.0
    """Below 1 speculation is LOSSY, it changes what the model says: the target's probabilities of drafts are divided by this."""
    attention_kernel: str | None = None
    """One of ATTENTION_KERNELS. None: pallas_triton on a GPU, else the kernel for CPUs if it is installed, or XLA by blocks."""
    matmul: str = "auto"
    """One of MATMULS. "skinny" is a kernel for GPUs, 8% slower than XLA on an H200; elsewhere it is plain XLA."""
    tp_size: int = 1
    """Devices that share the model (tensor parallel): each holds a part of every large matrix and of the cache."""
    overlap: bool = True
    """Launch cycle n+1 before the result of cycle n is read. False: one after another, with the same results."""
    random_seed: int | None = 0
    """Source of the seeds of sampled requests that have none. None: every engine draws one, as in `jaxspec serve`."""

    def __post_init__(self):
        self._check_types()
        for name in ("request_trees", "adaptive_trees"):
            trees = vars(self)[name]
            if isinstance(trees, str) or not isinstance(trees, Sequence):
                raise ValueError(f'{name} must be a list of draft trees, such as ["plain", "3/1/4"], got {trees!r:.200}')
            try:
                object.__setattr__(self, name, tuple(map(TreeShape.of, trees)))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        require_least(self, dict.fromkeys(_POSITIVE, 1) | {"context_length": 2, "draft_sink_size": 0, "ngram_share": 0})
        for name in ("mem_fraction", "accept_threshold_single", "accept_threshold_acc"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)}")
        if self.row_cost is not None and not 0 <= self.row_cost < 1:
            raise ValueError(f"row_cost must be at least 0 and below 1, got {self.row_cost}")
        if self.row_cost and self.is_lossy:
            raise ValueError(
                "row_cost has no effect with acceptance thresholds, under which all drafts are verified: leave out one"
            )
        if not self.ngram_min_match <= self.ngram_max_match <= LONGEST_MATCH:
            raise ValueError(
                f"ngram_min_match ({self.ngram_min_match}) must be at most ngram_max_match, and that at most {LONGEST_MATCH}, got "
                f"{self.ngram_max_match}"
            )
        if not self.ngram:
            for name in ("ngram_min_match", "ngram_max_match", "ngram_share"):
                if getattr(self, name) != getattr(EngineConfig, name):
                    raise ValueError(f"{name} has no effect without n-gram drafts: give ngram=True")
        if (tokens := (self.num_pages or 0) * self.page_size) >= MAX_SLOTS:
            raise ValueError(f"num_pages: a cache has less than {MAX_SLOTS} tokens, got {tokens}")
        if self.adaptive_trees and not self.adaptive:
            raise ValueError("adaptive_trees needs an adaptive engine: give adaptive=True")
        known: dict[str, Sequence[str]] = {"matmul": MATMULS, "kv_cache_dtype": KV_CACHE_DTYPES}
        optional = {"attention_kernel": ATTENTION_KERNELS, "draft_kv_cache_dtype": KV_CACHE_DTYPES}
        require_one_of(self, known | {name: values for name, values in optional.items() if getattr(self, name) is not None})
        if self.attention_kernel == "mosaic" and FP8 in (self.kv_cache_dtype, self.draft_kv_cache_dtype):
            raise ValueError(f"attention_kernel='mosaic' can't read a cache of 8 bits ({FP8}): leave out one of both")
        if self.draft_sink_size and self.draft_window_size is None:
            raise ValueError(f"draft_sink_size ({self.draft_sink_size}) needs a draft_window_size: without one the head sees all")

    def _check_types(self) -> None:
        for each in fields(self):
            kind = next((kind for kind in _KINDS if each.type in (kind, kind | None)), None)
            value = vars(self)[each.name]
            if kind is None or (value is None and each.type != kind):
                continue
            accepted, said = _KINDS[kind]
            if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
                raise ValueError(f"{each.name} must be {said}, got {value!r:.80}")

    @property
    def head_options(self) -> tuple[str, ...]:
        """The fields that are set and have no effect without a draft head. (Those about any drafts have one with `ngram`.)"""
        of_drafts = ("adaptive", "adaptive_trees", "row_cost", "accept_threshold_single", "accept_threshold_acc")
        names = ("draft_kv_cache_dtype", "draft_window_size", "draft_sink_size", *(() if self.ngram else of_drafts))
        return tuple(name for name in names if getattr(self, name) != getattr(EngineConfig, name))

    @property
    def is_lossy(self) -> bool:
        """Whether drafts may be accepted that the target would not have chosen."""
        return self.accept_threshold_single < 1 or self.accept_threshold_acc < 1
