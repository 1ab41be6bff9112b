"""Sizes of benchmarks.gpu: model, trees, batches and contexts, in full and tiny (to try it without a GPU)."""

from dataclasses import dataclass, replace

from jaxspec.config import PLAIN, ModelConfig, TreeShape
from jaxspec.models.eagle3 import Eagle3Config
from jaxspec.rope_config import RopeConfig

LLAMA_8B = ModelConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    rms_norm_eps=1e-5, max_position_embeddings=131072, dtype="bfloat16",
    rope=RopeConfig(theta=500000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
)  # fmt: skip
"""Llama 3.1 8B."""
TINY = ModelConfig(
    vocab_size=128, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16,
    max_position_embeddings=4096, dtype="bfloat16",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """One call of tree attention that `check` compares: batch, rows, window keys, longest context, page size."""

    name: str
    batch: int
    rows: int
    window: int
    context: int
    page: int

    def __str__(self) -> str:
        return f"{self.name}, batch {self.batch}, page {self.page}"


@dataclass(frozen=True)
class Size:
    """The sizes of a run."""

    target: ModelConfig
    head: Eagle3Config
    trees: tuple[TreeShape, ...]
    """The most important first: plain decoding, then those of parts.ANCHORS."""
    goal_trees: int
    """How many of them the part `cycle` times, at batch 1."""
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    goal_context: int
    """The context of these cycles."""
    kernel_batches: tuple[int, ...]
    kernel_rows: tuple[int, ...]
    shapes: tuple[Shape, ...]
    row_shapes: tuple[tuple[int, int], ...]
    """Sequences, and rows per sequence, of the norms and rotations that `check` compares."""
    product_rows: tuple[int, ...]
    """Rows of the matrix products of `gemm`."""
    tile_shapes: tuple[tuple[int, int], ...]
    """Rows and context of the calls of attention that `tiles` times."""
    text_trees: tuple[TreeShape, ...]
    """Trees of the built-in model whose text `text` compares, with plain decoding."""
    engine_requests: tuple[int, ...]
    engine_cycles: int
    """Cycles that are timed at a time."""
    server_requests: int
    """Requests that the server gets, for each number of them at once."""
    server_flags: tuple[str, ...]
    """Of the server's command."""
    prefill_chunks: tuple[int, ...]
    prefill_contexts: tuple[int, ...]
    copy_bytes: int
    matrix: int
    """Side of the square matrices for the arithmetic peak."""
    more_than_caches: int
    """Bytes that one timing of attention reads at least, so that the GPU's cache does not serve it."""
    chained: int
    """Calls of attention in one program."""
    samples: int
    sample_seconds: float
    """About the time of a sample, filled with repeated calls."""
    memory_limit: int | None = None
    """Bytes; None: as the device says."""

    def one_layer(self) -> "Size":
        """The same with a target of one layer."""
        target = replace(self.target, num_layers=1)
        return replace(self, target=target, head=head_of(target, (0, 1), self.head.draft_vocab_size or target.vocab_size))


MOST_CALLS = 16
"""The most cycles per sample: the context grows meanwhile."""
ASSUMED_ACCEPT_LENGTHS = (2.0, 3.0, 4.0)
"""Assumed tokens per cycle for a tree's tokens per second: random weights accept nothing."""


def shapes(contexts: tuple[int, int], chunk: int) -> tuple[Shape, ...]:
    """Decode, draft levels, verification, extension and prefill, at two page sizes."""
    short, long = contexts
    return (
        Shape("decode", 1, 1, 1, long, 16),
        Shape("decode", 8, 1, 1, short, 64),
        Shape("draft level 2", 1, 4, 8, long, 16),
        Shape("draft level 4 of 5/8/32", 8, 8, 32, short, 64),
        Shape("extend 6 rows", 8, 6, 6, short, 16),
        Shape("verify 8", 1, 8, 8, long, 16),
        Shape("verify 8", 8, 8, 8, short, 64),
        Shape("verify 32", 1, 32, 32, long, 64),
        Shape("verify 32", 8, 32, 32, short, 16),
        Shape("verify 64", 1, 64, 64, long, 16),
        Shape("verify 64", 8, 64, 64, short, 64),
        Shape(f"prefill {chunk}", 1, chunk, chunk, long, 16),
        Shape(f"prefill {chunk}", 1, chunk, chunk, short, 64),
        Shape("verify 8, empty cache", 1, 8, 8, 0, 16),
    )


def head_of(target: ModelConfig, captured_layers: tuple[int, ...], draft_vocab_size: int) -> Eagle3Config:
    """An EAGLE-3 head of one layer with the target's sizes."""
    return Eagle3Config(
        layer=replace(target, num_layers=1),
        target_hidden_size=target.hidden_size,
        captured_layers=captured_layers,
        draft_vocab_size=draft_vocab_size,
    )


FULL = Size(
    target=LLAMA_8B,
    head=head_of(LLAMA_8B, (2, 16, 29), 32000),
    trees=(PLAIN, TreeShape(3, 1, 4), TreeShape(7, 1, 8), TreeShape(5, 4, 8), TreeShape(5, 8, 32)),
    goal_trees=4,
    batches=(1, 4, 16, 64),
    contexts=(512, 4096, 32768),
    goal_context=1024,
    kernel_batches=(1, 8, 64),
    kernel_rows=(1, 8, 32),
    shapes=shapes((700, 3000), 256),
    row_shapes=((1, 1), (1, 8), (8, 8)),
    product_rows=(1, 4, 8, 64),
    tile_shapes=((8, 1024), (4, 1024), (1, 1024), (8, 32768)),
    text_trees=(PLAIN, TreeShape(3, 1, 4), TreeShape(5, 4, 8)),
    engine_requests=(1, 8),
    engine_cycles=48,
    server_requests=32,
    server_flags=(),
    prefill_chunks=(256, 2048),
    prefill_contexts=(0, 4096),
    copy_bytes=1 << 30,
    matrix=8192,
    more_than_caches=256 << 20,
    chained=16,
    samples=7,
    sample_seconds=0.06,
)
SMALL = Size(
    target=TINY,
    head=head_of(TINY, (0, 1), 64),
    trees=(PLAIN, TreeShape(1, 2, 3)),
    goal_trees=2,
    batches=(1, 2),
    contexts=(32,),
    goal_context=32,
    kernel_batches=(1, 2),
    kernel_rows=(4,),
    shapes=tuple(replace(shape, page=shape.page // 4) for shape in shapes((30, 50), 20)[3:6:2]),
    row_shapes=((2, 3),),
    product_rows=(4,),
    tile_shapes=((4, 32),),
    text_trees=(PLAIN, TreeShape(3, 1, 4)),
    engine_requests=(2,),
    engine_cycles=4,
    server_requests=2,
    server_flags=(
        *("--max-running-requests", "2", "--chunked-prefill-size", "64", "--speculative-request-trees", "none"),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    ),
    prefill_chunks=(16,),
    prefill_contexts=(32,),
    copy_bytes=1 << 16,
    matrix=64,
    more_than_caches=1 << 14,
    chained=2,
    samples=3,
    sample_seconds=0.002,
    memory_limit=110_000,
)
SIZES = {"full": FULL, "tiny": SMALL}
