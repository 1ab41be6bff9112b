"""The kinds of programs. A program is one compiled function of weights, state and its own inputs, with static shapes.

A kind of program says what it runs, which shapes it takes, and inputs with which it changes nothing; engine/programs.py compiles
whatever does so. They are dataclasses, not NamedTuples, because they are dictionary keys, and NamedTuples of different types with
equal values are equal.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.cycle import Proposal, cycle, propose, settle
from jaxspec.decoding.drafter import Models
from jaxspec.decoding.extend import catch_up
from jaxspec.decoding.prefill import Chunk, prefill
from jaxspec.decoding.settings import neutral_settings, settings_row
from jaxspec.decoding.state import Admission, ProgramOutput, State, admit, gather, mask
from jaxspec.decoding.tree import tree_of
from jaxspec.tree_shape import TreeShape
from jaxspec.typing import Array, Bool, Int, UInt

Rows, PageTable = Int[Array, " b"], Int[Array, "b p"]
type Inputs = tuple[Any, ...]
"""What a program takes in addition to weights and state."""


class Program(Protocol):
    """A kind of program in one size. `str` is its name for people."""

    @property
    def size(self) -> int:
        """Sequences or tokens; larger programs of the same kind serve smaller launches, which are padded."""

    @property
    def kind(self) -> Hashable:
        """What it does, apart from its size."""

    def run(self, models: Models, state: State, *inputs: Any) -> Any:
        """The function to compile. Returns the new State, or a NamedTuple with it as `state`."""

    def inputs(self, state: State, output_of: Callable[["Program"], Any]) -> Inputs:
        """The shapes of its inputs. `state` is abstract; `output_of`: the shapes that another program returns."""

    def idle(self, row: int, inputs: Inputs) -> Inputs:
        """NumPy arrays of these shapes with which it changes nothing but this free row."""


@dataclass(frozen=True)
class BatchProgram:
    """The base of programs for `batch` sequences whose page tables are `pages` wide."""

    batch: int
    pages: int

    @property
    def size(self) -> int:
        return self.batch

    @property
    def kind(self) -> Hashable:
        return (type(self),)

    def inputs(self, state: State, output_of: Callable[[Program], Any]) -> Inputs:
        """Rows of the state, and a page table for each."""
        return int32(self.batch), int32(self.batch, self.pages)

    def idle(self, row: int, inputs: Inputs) -> Inputs:
        _, *others = inputs
        return np.full(self.batch, row, np.int32), *zeros(others)


@dataclass(frozen=True)
class TreeProgram(BatchProgram):
    """The base of programs with draft trees of one shape."""

    tree: TreeShape

    @property
    def kind(self) -> Hashable:
        return type(self), self.tree


@dataclass(frozen=True)
class CycleProgram(TreeProgram):
    """One cycle."""

    def run(self, models: Models, state: State, rows: Rows, page_table: PageTable) -> ProgramOutput:
        return cycle(models, state, rows, page_table, self.tree)

    def __str__(self) -> str:
        return f"cycle {self.tree}, batch {self.batch}"


class Proposed(NamedTuple):
    """The output of a ProposeProgram."""

    state: State
    """Unchanged."""
    proposal: Proposal


@dataclass(frozen=True)
class ProposeProgram(TreeProgram):
    """The first half of a cycle: the host reads what it proposes."""

    def run(self, models: Models, state: State, rows: Rows, page_table: PageTable) -> Proposed:
        # All nodes will be verified: the host may change what stands where.
        return Proposed(state, propose(models._replace(row_cost=0.0), state, gather(state, rows, page_table), self.tree))

    def __str__(self) -> str:
        return f"propose {self.tree}, batch {self.batch}"


class Settlement(NamedTuple):
    """What a SettleProgram verifies: the tree, which the host may have changed, and what the host does not look at."""

    tokens: Any
    parents: Any
    """[b, n] int32 each, as in Tree."""
    memo: Any
    """As it was proposed."""
    masks: Any
    """[b, n, words] uint32: as for settle."""
    sources: Any = None
    """[b, n] int32, as in Tree."""

    @classmethod
    def of(cls, proposal: Proposal, masks: Any) -> "Settlement":
        """The proposal as it is, under these masks."""
        return cls(proposal.tree.tokens, proposal.tree.parents, proposal.memo, masks, proposal.tree.sources)


@dataclass(frozen=True)
class SettleProgram(TreeProgram):
    """The second half of a cycle, under masks of all nodes."""

    def run(self, models: Models, state: State, rows: Rows, page_table: PageTable, settlement: Settlement) -> ProgramOutput:
        tokens, parents, memo, masks, sources = settlement
        nodes, batch = tree_of(tokens, parents, self.tree.num_steps, sources), gather(state, rows, page_table)
        return settle(models, state, batch, Proposal(nodes, memo), self.tree.num_steps, masks)

    def inputs(self, state: State, output_of: Callable[[Program], Any]) -> Inputs:
        proposed: Proposed = output_of(ProposeProgram(self.batch, self.pages, self.tree))
        masks = uint32(self.batch, self.tree.num_draft_tokens, state.masks.shape[1])
        return *super().inputs(state, output_of), Settlement.of(proposed.proposal, masks)

    def __str__(self) -> str:
        return f"settle {self.tree}, batch {self.batch}"


@dataclass(frozen=True)
class CatchUpProgram(BatchProgram):
    """The drafter absorbs the tokens that it lags behind after plain cycles."""

    def run(self, models: Models, state: State, rows: Rows, page_table: PageTable) -> State:
        return catch_up(models, state, rows, page_table)

    def __str__(self) -> str:
        return f"catch up, batch {self.batch}"


@dataclass(frozen=True)
class PrefillProgram:
    """Chunks of `batch` prompts, one of each, of `chunk` tokens at most."""

    chunk: int
    pages: int
    batch: int = 1
    scores: bool = False
    """It computes the log probabilities of the prompt."""

    @property
    def size(self) -> int:
        return self.batch * self.chunk

    @property
    def kind(self) -> Hashable:
        return type(self), self.scores

    def run(self, models: Models, state: State, chunk: Chunk) -> ProgramOutput:
        return prefill(models, state, chunk, scores=self.scores)

    def inputs(self, state: State, output_of: Callable[[Program], Any]) -> Inputs:
        each, is_last = int32(self.batch), jax.ShapeDtypeStruct((self.batch,), jnp.bool_)
        table, tokens = int32(self.batch, self.pages), int32(self.batch, self.chunk)
        return (Chunk(each, table, tokens, each, each, each, is_last),)  # type: ignore[arg-type]

    def idle(self, row: int, inputs: Inputs) -> Inputs:
        (chunk,) = zeros(inputs)
        return (chunk._replace(row=np.full(self.batch, row, np.int32)),)

    def __str__(self) -> str:
        several = f"{self.batch} x " if self.batch > 1 else ""
        return f"prefill {several}{self.chunk} tokens{' with prompt log probabilities' if self.scores else ''}"


class RowProgram:
    """The base of programs that write one row of the state."""

    size = 1

    @property
    def kind(self) -> Hashable:
        return (type(self),)

    def idle(self, row: int, inputs: Inputs) -> Inputs:
        return np.full(1, row, np.int32), *zeros(inputs[1:])


@dataclass(frozen=True)
class AdmitProgram(RowProgram):
    """Sets up the state row of one request."""

    def run(self, models: Models, state: State, admission: Admission) -> State:
        return admit(state, admission)

    def inputs(self, state: State, output_of: Callable[[Program], Any]) -> Inputs:
        settings: Any = jax.eval_shape(lambda: neutral_settings(1))
        bias: Any = jax.ShapeDtypeStruct((1, state.bias.shape[1]), jnp.float32)
        return (Admission(int32(1), int32(1, state.history.shape[1]), int32(1), settings, bias),)

    def idle(self, row: int, inputs: Inputs) -> Inputs:
        (admission,) = zeros(inputs)
        return (admission._replace(row=np.full(1, row, np.int32), settings=settings_row()),)

    def __str__(self) -> str:
        return "admit"


@dataclass(frozen=True)
class MaskProgram(RowProgram):
    """Sets the mask of one row, or ends it."""

    def run(self, models: Models, state: State, rows: Rows, masks: UInt[Array, "b words"], masked: Bool[Array, " b"]) -> State:
        return mask(state, rows, masks, masked)

    def inputs(self, state: State, output_of: Callable[[Program], Any]) -> Inputs:
        return int32(1), uint32(1, state.masks.shape[1]), jax.ShapeDtypeStruct((1,), jnp.bool_)

    def __str__(self) -> str:
        return "mask"


@dataclass(frozen=True)
class LendProgram(RowProgram):
    """Gives one row a stretch of another request's text (decoding/ngram.py)."""

    tokens: int

    def run(self, models: Models, state: State, rows: Rows, stretch: Int[Array, "b l"]) -> State:
        return state._replace(draft=models.drafter.lend(state.draft, rows, stretch))

    def inputs(self, state: State, output_of: Callable[[Program], Any]) -> Inputs:
        return int32(1), int32(1, self.tokens)

    def __str__(self) -> str:
        return f"lend {self.tokens} tokens"


def int32(*shape: int) -> Any:
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def uint32(*shape: int) -> Any:
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, jnp.uint32)


def zeros(inputs: Any) -> Any:
    """NumPy arrays of these shapes."""
    return jax.tree.map(lambda each: np.zeros(each.shape, each.dtype), inputs)
