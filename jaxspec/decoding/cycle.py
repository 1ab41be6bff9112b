"""One cycle of speculative decoding: draft a tree, verify it, commit the accepted tokens, extend the head.

This is the whole algorithm; each stage has its own file. Plain decoding is the same cycle with an empty tree (num_steps = 0).
All sizes are static, so a cycle is one compiled program. docs/structure.md follows one token through it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.config import TreeShape
from jaxspec.decoding.commit import advance, commit
from jaxspec.decoding.coupling import couple, learn
from jaxspec.decoding.draft import SlidingWindow, draft_tree
from jaxspec.decoding.extend import extend
from jaxspec.decoding.sampling import Logprobs, Thresholds, logprobs_if, logprobs_of
from jaxspec.decoding.state import Batch, Drafted, Models, ProgramOutput, State, gather
from jaxspec.decoding.verify import Accepted, Verified, accept, report, verify
from jaxspec.typing import Array, Int


@dataclass(frozen=True)
class CycleOptions:
    """The options that all cycles of an engine share."""

    sliding_window: SlidingWindow | None = None
    """The part of its cache that the head sees; None: all of it."""
    thresholds: Thresholds | None = None
    """Under these, drafts that the target did not choose may be accepted. None, the default: lossless."""

    def couples(self, tree: TreeShape) -> bool:
        """Whether drafts may look at the target's noise. A threshold's drafts must not depend on it."""
        return tree.num_steps > 0 and self.thresholds is None


LOSSLESS = CycleOptions()


def cycle(
    models: Models,
    state: State,
    rows: Int[Array, " b"],
    page_table: Int[Array, "b p"],
    *,
    tree: TreeShape,
    options: CycleOptions = LOSSLESS,
) -> ProgramOutput:
    """Advances the sequences in these state rows by 1 .. num_steps + 1 tokens each.

    Before a cycle with a tree the head must not lag behind (extend.catch_up).
    """
    batch = gather(state, rows, page_table)
    coupling = couple(state, batch, tree.num_steps) if options.couples(tree) else None
    draft = draft_tree(models, state, batch, tree, options.sliding_window, coupling)
    verified = verify(models, state, batch, draft.tree, coupling and coupling.noise, options.thresholds)
    accepted = accept(draft.tree, verified.target_tokens, batch, tree.num_steps)
    state = commit(state, batch, verified, accepted)
    state = advance(state, batch, accepted)
    state = extend(models, state, batch, verified, accepted, options.sliding_window)
    state = learn(models, state, batch, coupling, draft.root_logits, verified.target_tokens[:, 0])
    drafted = Drafted(draft.tree.tokens, draft.tree.parents, accepted.path)
    return ProgramOutput(state, report(accepted), logprobs(verified, accepted, batch), drafted=drafted)


@jax.named_scope("logprobs")
def logprobs(verified: Verified, accepted: Accepted, batch: Batch) -> Logprobs:
    """The log probabilities of the emitted tokens; computed only if a running request of the batch wants them."""

    def compute() -> Logprobs:
        return logprobs_of(jnp.take_along_axis(verified.logits, accepted.path[:, :, None], 1), accepted.tokens)

    return logprobs_if(batch.settings.wants_logprobs & ~batch.sequences.done, compute)
