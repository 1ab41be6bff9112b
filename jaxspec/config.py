"""The shape of a model (ModelConfig), of its draft tree (TreeShape), and how the engine runs (EngineConfig).

All are frozen. A wrong value raises ValueError at construction; the message names the field and says what to do.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING

from jaxspec.checks import is_int, require_least, require_one_of
from jaxspec.config_json import checked, refuse_unsupported, require_size
from jaxspec.rope import RopeConfig

if TYPE_CHECKING:
    from jaxspec.models.feed_forward import FeedForward
    from jaxspec.models.linear import Storage

DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of weights; "auto" chooses one of them."""
FP8 = "fp8_e4m3"
KV_CACHE_DTYPES = ("auto", FP8)
"""How keys and values are stored: as the activations are, or in 8 bits (pallas_kernels/fp8.py)."""
QUANTIZATIONS = ("int8", "fp8", "int4")
"""How matrices can be quantised while they are loaded: 8-bit numbers with a scale per row, or 4-bit ones with a scale per group."""
UNQUANTIZED = ("none", "None", "unquant")
"""Names of no quantisation."""
QUANTIZED = (*QUANTIZATIONS, *UNQUANTIZED)
QUANTIZE_BY = f"must be one of {', '.join(QUANTIZATIONS)} or none (a quantised checkpoint says itself how: leave the option out)"


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-family decoder, from the fields of a Hugging Face config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_position_embeddings: int = 2048
    """The longest sequence, prompt and output, that the model was trained for, in tokens."""
    tie_word_embeddings: bool = False
    """True: the transposed embedding is the output projection, and the checkpoint has no lm_head."""
    qkv_bias: bool = False
    """The query, key and value projections have biases (Qwen2, MiMo)."""
    qk_norm: bool = False
    """Queries and keys are normalized per head before RoPE (Qwen3)."""
    kv_scales: bool = False
    """The checkpoint has a scale for the keys and one for the values of each layer, for caches of 8 bits."""
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    """The dtype of the checkpoint; the engine may use another."""
    storage: "Storage | None" = None
    """How matrices are stored. None: as they are (pallas_kernels.weight.Dense)."""
    storages: "tuple[tuple[tuple[str | int, ...], Storage], ...]" = ()
    """Those of single layers, by their path in the module, where they differ; and the embedding's, which is stored transposed."""
    feed_forward: "FeedForward | None" = None
    """The kind of feed-forward. None: a SwiGLU MLP, `intermediate_size` wide."""

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")
        if unknown := [token for token in self.eos_token_ids if token >= self.vocab_size]:
            raise ValueError(f"eos_token_id names token {unknown[0]}; the vocabulary has {self.vocab_size} tokens")

    @classmethod
    def from_hf(cls, config: dict, *, qkv_bias: bool = False, qk_norm: bool = False) -> "ModelConfig":
        """From a parsed config.json. Biases and norms are not in it: the model family or the file tells.

        Raises:
            ValueError: an attribute is missing or has a value that is not supported; the message names it.
        """
        refuse_unsupported(config := checked(config))
        heads, hidden_size = require_size(config, "num_attention_heads"), require_size(config, "hidden_size")
        eos, longest = config.get("eos_token_id"), require_size(config, "max_position_embeddings", default=2048)
        if (chunks := config.get("dual_chunk_attention_config")) is not None:  # beyond one, attention is another one
            longest = min(longest, chunks.get("original_max_position_embeddings") or longest)
        return cls(
            vocab_size=require_size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=require_size(config, "intermediate_size"),
            num_layers=require_size(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=require_size(config, "num_key_value_heads", default=heads),
            head_dim=require_size(config, "head_dim", default=hidden_size // heads),
            rms_norm_eps=config.get("rms_norm_eps") or 1e-6,
            rope=(rope := RopeConfig.from_hf(config)),
            max_position_embeddings=max(longest, rope.max_position),
            tie_word_embeddings=config.get("tie_word_embeddings") or False,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
        )


@dataclass(frozen=True, init=False)
class TreeShape:
    """The draft tree: depth, width and number of verified nodes. SGLang's three numbers, with its names.

    TreeShape() is 5/4/8; TreeShape(num_steps=0) is plain decoding; topk=1 is a chain of num_steps + 1 nodes.
    Give all three numbers or none (topk=1 and num_steps=0 need no num_draft_tokens). Where n-grams are merged with a head, a fourth
    limits the head: 7/4/8/3 is TreeShape(7, 4, 8, head_steps=3).
    """

    num_steps: int
    """Levels below the root; at most num_steps drafts are accepted per cycle."""
    topk: int
    """Children kept per drafted token."""
    num_draft_tokens: int
    """Nodes that the target verifies, the root included."""
    head_steps: int | None = None
    """Levels that a head drafts, where deeper ones are left to n-grams, whose depth costs nothing; 0: it only absorbs the accepted
    tokens. None: all."""

    def __init__(
        self,
        num_steps: int | None = None,
        topk: int | None = None,
        num_draft_tokens: int | None = None,
        head_steps: int | None = None,
    ):
        given = {"num_steps": num_steps, "topk": topk, "num_draft_tokens": num_draft_tokens}
        for name, value in (given | {"head_steps": head_steps}).items():
            if value is not None and not (is_int(value) and value >= 0):
                raise ValueError(f"{name} must be a whole number >= 0, got {value!r:.80}")
        num_steps, topk, num_draft_tokens = (None if value is None else int(value) for value in given.values())
        if num_steps is None and topk is None and num_draft_tokens is None:
            num_steps, topk, num_draft_tokens = 5, 4, 8
        elif num_steps == 0:
            if topk not in (None, 0, 1) or num_draft_tokens not in (None, 0, 1):
                raise ValueError(f"num_steps=0 is plain decoding and takes no tree: leave out {topk=} and {num_draft_tokens=}")
            topk, num_draft_tokens = 1, 1
        elif num_steps is not None and topk == 1:
            if num_draft_tokens not in (None, num_steps + 1):
                message = f"topk=1 drafts a chain: {num_draft_tokens=} becomes num_steps + 1 = {num_steps + 1}"
                warnings.warn(message, stacklevel=2)
            num_draft_tokens = num_steps + 1
        if num_steps is None or topk is None or num_draft_tokens is None:
            missing = ", ".join(name for name, value in given.items() if value is None)
            raise ValueError(f"give num_steps, topk and num_draft_tokens together or none of them; missing: {missing}")
        if topk < 1:
            raise ValueError("topk must be at least 1; for plain decoding give num_steps=0")
        available = most_nodes(num_steps, topk)
        if not min(2, available) <= num_draft_tokens <= available:
            raise ValueError(
                f"{num_draft_tokens=} must be between 2 and {available} = 1 + topk + (num_steps - 1) * topk^2, the root and "
                f"all that {num_steps=} and {topk=} draft: lower num_draft_tokens or raise num_steps or topk"
            )
        object.__setattr__(self, "num_steps", num_steps)
        object.__setattr__(self, "topk", topk)
        object.__setattr__(self, "num_draft_tokens", num_draft_tokens)
        if head_steps is not None and head_steps > num_steps:
            raise ValueError(f"{head_steps=} must be at most {num_steps=}, the levels of the tree: lower it or leave it out")
        if head_steps not in (None, num_steps):  # equal trees have one name
            object.__setattr__(self, "head_steps", int(head_steps))

    def __repr__(self) -> str:  # stored programs have it in their names
        return f"TreeShape({', '.join(f'{name}={value}' for name, value in vars(self).items())})"

    def __str__(self) -> str:
        return "/".join(map(str, vars(self).values()))

    @property
    def name(self) -> str:
        """As people write it: "5/4/8", or "plain" for plain decoding."""
        return str(self) if self.num_steps else "plain"

    @property
    def of_head(self) -> "TreeShape":
        """What a head drafts of it: all, or its first levels.

        In:  7/4/8/1
        Out: 1/4/5
        """
        if not self.head_steps:
            return self if self.head_steps is None else PLAIN
        return TreeShape(self.head_steps, self.topk, min(self.num_draft_tokens, most_nodes(self.head_steps, self.topk)))

    def limited(self, head_steps: int) -> "TreeShape":
        """This tree, of which a head drafts so many levels only."""
        return TreeShape(self.num_steps, self.topk, self.num_draft_tokens, head_steps)

    @classmethod
    def of(cls, value: "TreeLike") -> "TreeShape":
        """A draft tree in any of the ways in which it is written.

        In:  TreeShape(5, 4, 8) or "5/4/8" or (5, 4, 8) or {"num_steps": 5, "topk": 4, "num_draft_tokens": 8}
        Out: TreeShape(5, 4, 8)
        In:  "7/4/8/3" or (7, 4, 8, 3)
        Out: TreeShape(7, 4, 8, head_steps=3)
        In:  "plain" or "0" or {"num_steps": 0}
        Out: TreeShape(num_steps=0)

        Raises:
            ValueError: `value` is none of these, or its numbers don't make a tree.
        """
        if isinstance(value, TreeShape):
            return value
        if isinstance(value, str) and value.strip() in ("0", "plain"):
            return PLAIN
        if isinstance(value, str) and re.fullmatch(r"\d{1,4}(/\d{1,4}){2,3}", value.strip()):
            return cls(*map(int, value.split("/")))
        if isinstance(value, Mapping) and value:
            names = {str(name): str(name).removeprefix("speculative_").replace("eagle_topk", "topk") for name in value}
            unknown = [name for name, own in names.items() if own not in ("num_steps", "topk", "num_draft_tokens", "head_steps")]
            if unknown or len(set(names.values())) < len(names):
                has = "num_steps, topk and num_draft_tokens, and may have head_steps"
                raise ValueError(f"a draft tree has {has}, got {', '.join(unknown or names):.80}")
            return cls(**{own: value[name] for name, own in names.items()})
        if isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) in (3, 4):
            return cls(*value)
        notation = 'num_steps/topk/num_draft_tokens, as in "5/4/8", or head_steps too, as in "7/4/8/3", or "plain"'
        raise ValueError(f"a draft tree is {notation}; got {value!r:.80}")


def most_nodes(num_steps: int, topk: int) -> int:
    """Of a tree: the root and all that are drafted."""
    return 1 + topk + (num_steps - 1) * topk**2 if num_steps else 1


type TreeLike = TreeShape | str | Sequence[int] | Mapping[str, int]
"""The argument of TreeShape.of."""


def names_of(trees: Sequence[TreeShape]) -> str:
    """In:  TreeShape(num_steps=0), TreeShape(3, 1)
    Out: plain, 3/1/4
    """
    return ", ".join(tree.name for tree in trees)


PLAIN = TreeShape(num_steps=0)
"""No draft tree: plain decoding."""
NGRAM_TREE = TreeShape(7, 4, 8)
"""The default of n-gram drafts, whose depth costs nothing."""


ATTENTION_KERNELS = ("reference", "pallas_triton", "mosaic")
"""Implementations of pallas_kernels.tree_attention."""
MATMULS = ("auto", "xla", "skinny")
"""What computes matrix products: pallas_kernels.row_matmul on CPUs that have it and XLA elsewhere; XLA everywhere; or
pallas_kernels.skinny_matmul, on GPUs, those of at most 16 rows. With "auto" it also computes all with weights of 8 and 4 bits."""


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
    """The same for the draft head's cache. None: as the target's."""
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
        """The fields that are set and have no effect without a draft head, nor with `ngram` unless they are about drafts at all."""
        of_drafts = ("adaptive", "adaptive_trees", "accept_threshold_single", "accept_threshold_acc")
        names = ("draft_kv_cache_dtype", "draft_window_size", "draft_sink_size", *(() if self.ngram else of_drafts))
        return tuple(name for name in names if getattr(self, name) != getattr(EngineConfig, name))

    @property
    def is_lossy(self) -> bool:
        """Whether drafts may be accepted that the target would not have chosen."""
        return self.accept_threshold_single < 1 or self.accept_threshold_acc < 1
