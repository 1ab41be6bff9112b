"""What decides the data and the head that `jaxspec train` makes. Importing this loads no JAX."""

from dataclasses import dataclass

from jaxspec.checks import require_least, require_one_of

BLOCKS = ("dflash", "jetspec")
"""Heads that draft a block at once."""
ALGORITHMS = ("eagle3", "eagle3.1", "eagle", "mtp", *BLOCKS)
LOSSES = ("cross-entropy", "lk")
SIZES = {
    "draft_vocab_size": ("eagle3", "eagle3.1"),
    "intermediate_size": ("eagle3", "eagle3.1", "eagle", *BLOCKS),
    "num_layers": BLOCKS,
}
"""Sizes that can be chosen, and for which algorithms."""
LEAST_BLOCK = 5
"""Tokens that a block head must draft at least: heads are compared by trees that are so deep."""


@dataclass(frozen=True)
class DataSettings:
    """What decides which conversations are written. The same settings write the same ones."""

    model: str
    prompts: str | None = None
    """SHA-256 of the file with prompts; None: the target writes them."""
    per_shard: int = 128
    """Conversations begun for each shard; a few are left out."""
    seed: int = 0
    max_tokens: int = 512
    """Maximum length of a conversation, in tokens. It ends when no further turn fits."""
    max_user_tokens: int = 160
    max_answer_tokens: int = 384
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7)
    """Of answers; one for each, by chance."""
    more_turns: float = 0.35
    """Probability of another user turn, if turns are invented or made from topics; up to max_turns."""
    max_turns: int = 3


@dataclass(frozen=True)
class TrainSettings:
    """What decides the result, besides the data."""

    algorithm: str = "eagle3"
    """eagle3; eagle3.1, with its norms; eagle (EAGLE-1 and 2); mtp, which finetunes the model's own layer; or a block head: dflash,
    or jetspec, whose block is causal."""
    loss: str = "cross-entropy"
    """cross-entropy, or lk: the chance of acceptance at temperature 1 (arXiv 2602.23881)."""
    begin: str | None = None
    """A head to train further; its sizes and draft vocabulary stay. None: a new one."""
    steps: int = 2600
    """Batches."""
    rows: int = 2
    """Rows of a batch. With little data, small batches and many steps learn most."""
    length: int = 512
    """Tokens of a row, and of the longest conversation."""
    depth: int | None = None
    """Unroll steps. More cost time and help trees with more levels; for MTP the levels that its one layer will be used for; for a
    block head the tokens that a block drafts. None: 3, or 7 for a block head."""
    draft_vocab_size: int | None = None
    """Tokens that an EAGLE-3 head can draft: those that the text uses most. None: as many as cover 98% of it, at most 8192."""
    intermediate_size: int | None = None
    """Of the head's MLP. None: the target's."""
    num_layers: int | None = None
    """Of a block head. None: an eighth of the target's."""
    matrix_rate: float = 0.02
    """Peak learning rate of Muon, which trains the matrices inside layers."""
    other_rate: float = 1e-3
    """Peak learning rate of AdamW, which trains the rest."""
    seed: int = 0
    """Of the new head's weights and of the order of batches."""
    eval_every: int = 500
    """Steps between evaluations."""
    eval_prompts: int = 32
    """Held-out prompts for the engine."""

    def __post_init__(self):
        require_one_of(self, {"algorithm": ALGORITHMS, "loss": LOSSES})
        positive = ("steps", "rows", "length", "depth", *SIZES, "eval_every", "eval_prompts")
        require_least(self, dict.fromkeys(positive, 1) | {"seed": 0})
        for name, algorithms in SIZES.items():
            if vars(self)[name] is not None and (self.begin is not None or self.algorithm not in algorithms):
                raise ValueError(f"{name} is for new heads of the algorithms {', '.join(algorithms)}: leave it out")
        if self.algorithm in BLOCKS and self.levels < LEAST_BLOCK:
            raise ValueError(f"depth must be at least {LEAST_BLOCK} for {self.algorithm}, got {self.depth}")

    @property
    def levels(self) -> int:
        """Tokens that are drafted in training, one after another."""
        return self.depth or (7 if self.algorithm in BLOCKS else 3)
