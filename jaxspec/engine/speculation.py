"""What became of a request's drafts: counts by cycle, the trees, and who proposed what. Plain Python, no JAX."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from jaxspec.grammar.trees import Pruning
from jaxspec.tree_shape import TreeShape


class DraftSources(NamedTuple):
    """Who proposed the drafts of a cycle (Drafter.source_names). Both are empty unless drafters are merged."""

    accepted: tuple[str, ...] = ()
    """Who proposed each accepted draft, in order."""
    drafted: tuple[str, ...] = ()
    """Who proposed each verified draft."""


class CycleCounts(NamedTuple):
    """The counts of one cycle for one request."""

    emitted: int
    """Tokens, bonus included."""
    accepted: int
    """Accepted drafts among them."""
    drafted: int
    """Drafts that were verified: on CPUs those that pay."""
    num_steps: int
    """The depth of the tree: `accepted` is at most this. 0: plain decoding."""
    sources: tuple[str, ...] = ()
    """Who proposed each accepted draft, where drafters are merged (Drafter.source_names)."""


@dataclass(frozen=True)
class Speculation:
    """The cycles of one request. The prefill, which emits the first token, is not one of them."""

    cycles: tuple[CycleCounts, ...] = ()

    @property
    def accept_lengths(self) -> tuple[int, ...]:
        """Tokens that each cycle emitted, bonus included."""
        return tuple([cycle.emitted for cycle in self.cycles])

    @property
    def verify_count(self) -> int:
        """Cycles: forwards of the target after the prefill."""
        return len(self.cycles)

    @property
    def accept_length(self) -> float:
        """Tokens per cycle, bonus included; plain decoding has 1.0. 0.0 without a cycle."""
        return sum(self.accept_lengths) / len(self.cycles) if self.cycles else 0.0

    @property
    def accepted_drafts(self) -> int:
        return sum([cycle.accepted for cycle in self.cycles])

    @property
    def proposed_drafts(self) -> int:
        return sum([cycle.drafted for cycle in self.cycles])

    @property
    def accept_rate(self) -> float:
        """Accepted drafts divided by proposed ones; 0.0 without drafts."""
        return self.accepted_drafts / self.proposed_drafts if self.proposed_drafts else 0.0

    @property
    def accepted_by_source(self) -> dict[str, int]:
        """Accepted drafts by who proposed them; empty unless drafters are merged."""
        return dict(Counter([source for cycle in self.cycles for source in cycle.sources]))

    @property
    def with_tree(self) -> tuple[CycleCounts, ...]:
        """The cycles that were not plain decoding."""
        return tuple([cycle for cycle in self.cycles if cycle.num_steps])

    @property
    def tree_accept_length(self) -> float | None:
        """Tokens per cycle with a tree, bonus included; None without such a cycle."""
        cycles = self.with_tree
        return sum([cycle.emitted for cycle in cycles]) / len(cycles) if cycles else None


@dataclass(frozen=True)
class DraftedTree:
    """The tree of one cycle, as far as it was verified. Node 0 is the root, the newest token before the cycle."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Node number of each node's parent, -1 for the root; parents come before children."""
    accepted: tuple[int, ...]
    """The accepted path, root first."""
    sources: tuple[str, ...] = ()
    """Who proposed each node below the root, where drafters are merged."""
    pruning: Pruning | None = None
    """What the request's grammar changed of the tree before it was verified; None without a grammar."""


@dataclass(frozen=True)
class Verification:
    """The cycle that the tokens of an update come from."""

    shape: TreeShape
    accepted: int
    """The first `accepted` tokens are accepted drafts."""
    tree: DraftedTree | None = None
    """If the request has `wants_trees` and drafts were verified."""
