"""The table of an engine's programs, and the choice of those that fit a launch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxspec.config import EngineConfig
from jaxspec.decoding.programs import (
    AdmitProgram,
    CatchUpProgram,
    CycleProgram,
    LendProgram,
    MaskProgram,
    PrefillProgram,
    Program,
    ProposeProgram,
    SettleProgram,
)
from jaxspec.engine.text_store import LENT
from jaxspec.tree_shape import PLAIN, TreeShape

MOST_PROMPTS = 8
"""Prompts whose chunks one program computes, at most."""


class Ready(NamedTuple):
    """What launches may use."""

    batches: tuple[int, ...]
    """The batch sizes at which each of `trees` that the engine chooses from has a program."""
    trees: tuple[TreeShape, ...]
    """The trees whose programs are there."""
    in_two: tuple[TreeShape, ...]
    """The trees whose cycles can run in two programs, under masks of all nodes."""


class ProgramCount(NamedTuple):
    """Progress of compiling."""

    ready: int = 0
    total: int = 0
    seconds_left: int | None = None
    """A forecast; None: nothing is known yet, or nothing compiles."""


@dataclass(frozen=True)
class ProgramTable:
    """The sizes that programs are compiled for. Larger programs serve smaller launches, which are padded."""

    batches: tuple[int, ...]
    chunks: tuple[int, ...]
    prompts: tuple[int, ...]
    """By chunk size: how many prompts' chunks of this size one program computes at once."""
    pages: int
    """Entries of every page table. Attention stops at the longest sequence, so narrower tables would gain nothing."""
    own: tuple[TreeShape, ...]
    """The trees that the engine chooses from."""
    trees: tuple[TreeShape, ...]
    """The trees in `own`, and those used only by requests that ask for them."""
    catches_up: bool
    """Plain cycles alternate with trees, so the drafter has to catch up before a tree."""
    lent: int = 0
    """Tokens of another request's text that a row may be lent; 0: none."""
    own_first: bool = True
    """Trees that only single requests ask for compile after the start. Until then such a request gets the engine's choice of tree,
    which changes no text. (False in lossy engines, where the tree changes the text.)"""

    @classmethod
    def of(
        cls, config: EngineConfig, pages: int, own: Sequence[TreeShape], trees: Sequence[TreeShape], *, catches_up: bool
    ) -> "ProgramTable":
        """In:  max_running_requests 20, prefill_chunk 256 or more, pages for 256 tokens, which no sequence exceeds
        Out: batches (1, 2, 3, 4, 6, 8, 12, 16, 20), chunks (16, 64, 128, 256), prompts (8, 4, 2, 1)
        """
        most = config.max_running_requests
        powers = [2**power for power in range(most.bit_length())]
        batches = {size for power in powers for size in (power, power + power // 2) if size < most} | {most}
        largest = min(config.prefill_chunk, pages * config.page_size)
        # Half a chunk: what each of two prompts gets.
        chunks = sorted({max(1, largest // share) for share in (1, 2, 4, 16)})
        prompts = [min(largest // chunk, most, MOST_PROMPTS) for chunk in chunks]  # not more tokens than the largest
        return cls(
            batches=tuple(sorted(batches)), chunks=tuple(chunks), prompts=tuple(prompts), pages=pages, own=tuple(own),
            trees=tuple(trees), catches_up=catches_up, lent=LENT if config.ngram_share else 0, own_first=not config.is_lossy,
        )  # fmt: skip

    @property
    def few_batches(self) -> tuple[int, ...]:
        """Powers of two and the largest, for cycles that only single requests ask for: fewer programs to compile.

        In:  batches (1, 2, 3, 4, 6, 8, 12, 16, 20)
        Out: (1, 2, 4, 8, 16, 20)
        """
        return tuple(size for size in self.batches if size.bit_count() == 1 or size == self.batches[-1])

    def batches_for(self, tree: TreeShape) -> tuple[int, ...]:
        """The batch sizes that cycles with this tree are compiled for."""
        return self.batches if tree in self.own else self.few_batches

    def all(self) -> list[Program]:
        """Every program; small batches and short prompts come first."""
        cycles = [program for tree in self.trees for program in self.cycles(1, tree)]
        catch_ups = self.catch_ups(1) if self.catches_up else ()
        prefills = dict.fromkeys([*self.prefills(1), *map(self.prefill_together, self.chunks)])
        programs: list[Program] = [*self._for_rows(), *prefills, *cycles, *catch_ups]
        return sorted(programs, key=self._place)

    def first(self) -> list[Program]:
        """The programs that serve every request: the largest of each kind and tree. (The costly ones first.) An engine whose own
        tree is plain decoding begins with that."""
        own = self.own[:1] if self.own[0] == PLAIN else self.own
        return self._serving(own if self.own_first else self.trees)

    def next_after_start(self) -> list[Program]:
        """The programs that compile in the background before a launch needs them, unless they are there already: cycles of one
        request, as first requests often come alone and gain most from a smaller program; those that make first requests under
        grammars faster; and the largest of every tree."""
        first, *others = [next(self.cycles(1, tree)) for tree in self.own]
        largest = [program for tree in self.trees for program in self.largest(tree)]
        return [first, *self.under_masks(self.own[0]), *others, *largest]

    def largest_of_all(self) -> list[Program]:
        """The largest program of each kind and of every tree: no program takes more memory than the largest of these."""
        return self._serving(self.trees)

    def _serving(self, trees: Sequence[TreeShape]) -> list[Program]:
        cycles = [program for tree in sorted(trees, key=lambda tree: -tree.num_steps) for program in self.largest(tree)]
        return [*dict.fromkeys(cycles), PrefillProgram(self.chunks[-1], self.pages), *self._for_rows()]

    def _for_rows(self) -> list[Program]:
        """The programs that set up a row."""
        return [AdmitProgram(), MaskProgram(), *([LendProgram(self.lent)] if self.lent else [])]

    def largest(self, tree: TreeShape) -> list[Program]:
        """The programs without which a tree can't be used, each in its largest size."""
        batch = self.batches[-1]
        needs_catch_up = tree.num_steps == 0 and self.catches_up
        return [*([CatchUpProgram(batch, self.pages)] if needs_catch_up else []), CycleProgram(batch, self.pages, tree)]

    # The programs that fit a launch, smallest first.

    def cycles(self, requests: int, tree: TreeShape) -> Iterator[CycleProgram]:
        """Cycles for this many requests."""
        return (CycleProgram(batch, self.pages, tree) for batch in self.batches_for(tree) if batch >= requests)

    def halves(self, requests: int, tree: TreeShape) -> Iterator[tuple[ProposeProgram, SettleProgram]]:
        """Both halves of cycles for this many requests. Neither a start nor a request waits for them: they compile in the
        background (`next_after_start`), or when a request under a grammar asks for them, which gets one token per cycle
        meanwhile."""
        sizes = (cycle.batch for cycle in self.cycles(requests, tree))
        return ((ProposeProgram(size, self.pages, tree), SettleProgram(size, self.pages, tree)) for size in sizes)

    def under_masks(self, tree: TreeShape) -> list[Program]:
        """The halves without which requests under grammars have no drafts from this tree: the largest, and those for one request
        alone, which the largest would slow down more than the tree gains."""
        halves = list(self.halves(1, tree))
        return list(dict.fromkeys([*halves[0], *halves[-1]]))

    def prefills(self, tokens: int, *, scores: bool = False) -> Iterator[PrefillProgram]:
        """Prefills for a chunk of this many tokens. No start compiles those with log probabilities: a request for these waits."""
        return (PrefillProgram(chunk, self.pages, 1, scores) for chunk in self.chunks if chunk >= tokens)

    def prefill_together(self, tokens: int) -> PrefillProgram:
        """The prefill of several prompts, for chunks of this many tokens; the largest is for one."""
        chunk, prompts = next(pair for pair in zip(self.chunks, self.prompts, strict=True) if pair[0] >= tokens)
        return PrefillProgram(chunk, self.pages, prompts)

    def catch_ups(self, requests: int) -> Iterator[CatchUpProgram]:
        """Catch-ups for this many requests."""
        return (CatchUpProgram(batch, self.pages) for batch in self.batches_for(PLAIN) if batch >= requests)

    def ready(self, can_launch: Callable[[Program], bool]) -> Ready:
        """What may be used if these programs can be launched."""
        trees = tuple(tree for tree in self.trees if all(map(can_launch, self.largest(tree))))
        own = [tree for tree in self.own if tree in trees]
        usable = (batch for batch in self.batches if all(can_launch(CycleProgram(batch, self.pages, tree)) for tree in own))
        in_two = tuple(tree for tree in self.trees if all(map(can_launch, self.under_masks(tree))))
        return Ready(tuple(usable) or self.batches[-1:], trees, in_two)

    def _place(self, program: Program) -> int:
        """Programs of the smallest sizes come first, then those of the next."""
        if isinstance(program, PrefillProgram):
            return self.chunks.index(program.chunk)
        return self.batches.index(program.size) if program.size in self.batches else 0


NO_PROGRAMS = ProgramTable(batches=(), chunks=(), prompts=(), pages=0, own=(), trees=(), catches_up=False)
"""The table of programs that are only compiled by name."""
