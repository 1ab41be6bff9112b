"""Which chunks of a step run in one program.

Chunks in one program run at the same time, so none of them may read or write a page that another one writes. The prefix cache makes
such pairs: a chunk's pages are published when it is planned, and the next prompt of the same step may begin with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxspec.decoding.programs import PrefillProgram
from jaxspec.engine.program_table import ProgramTable
from jaxspec.engine.scheduler import PrefillChunk


@dataclass
class Group:
    """Chunks for one launch."""

    program: PrefillProgram
    """The one that they fit in."""
    is_alone: bool
    chunks: list[PrefillChunk] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    """Pages that they write."""
    touched: set[int] = field(default_factory=set)
    """And those that they read."""

    def has_room(self, program: PrefillProgram) -> bool:
        """Whether one more chunk that needs this program may join."""
        return program == self.program and not self.is_alone and len(self.chunks) < program.batch


def grouped(chunks: Sequence[PrefillChunk], table: ProgramTable, page_size: int) -> list[list[PrefillChunk]]:
    """The chunks of a step in groups that fit into one program each, in an order in which they may be launched: each after all it
    depends on. Prompts whose log probabilities are wanted are alone. In a group, chunks that end their prompts come first.

    In:  chunks of 10, 50, 12 and 16 tokens, programs for 16 and 64; the fourth begins with pages that the first writes
    Out: [10, 12], [50], [16]
    """
    groups: list[Group] = []
    for chunk in chunks:
        program, is_alone = table.prefill_together(chunk.size), chunk.request.params.prompt_logprobs is not None
        end = chunk.first_slot + chunk.size + chunk.is_last  # a head also writes the slot of the token that is emitted
        touched = chunk.pages[: -(-end // page_size)]
        written = touched[chunk.cached // page_size :]
        group: Group | None = None
        for earlier in reversed(groups):  # it may run before others that it has nothing to do with
            if not (earlier.written.isdisjoint(touched) and earlier.touched.isdisjoint(written)):
                break
            if not is_alone and earlier.has_room(program):
                group = earlier
        if group is None:
            group = Group(program, is_alone)
            groups.append(group)
        group.chunks.append(chunk)
        group.written.update(written)
        group.touched.update(touched)
    return [sorted(group.chunks, key=lambda chunk: not chunk.is_last) for group in groups]
