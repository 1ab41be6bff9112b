"""One cycle of speculative decoding: draft a tree, verify it, commit the accepted tokens, extend the head.

This is the whole algorithm; each stage has its own file. Plain decoding is the same cycle with an empty tree (num_steps = 0).
All sizes are static, so a cycle is one compiled program. docs/structure.md follows one token through it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.config import SpecConfig
from jaxspec.spec.commit import advance, commit
from jaxspec.spec.coupling import couple, learn
from jaxspec.spec.draft import SlidingWindow, draft_tree
from jaxspec.spec.extend import extend
from jaxspec.spec.sampling import Logprobs, Thresholds, logprobs_if, logprobs_of
from jaxspec.spec.state import Batch, Drafted, Models, State, StepOutput, gather
from jaxspec.spec.verify import Accepted, Verified, accept, report, verify
from jaxspec.typing import Array, Int


@dataclass(frozen=True)
class CycleOptions:
    """The options that all cycles of an engine share."""

    sliding_window: SlidingWindow | None = None
    """The part of its cache that the head sees; None: all of it."""
    thresholds: Thresholds | None = None
    """Under these, drafts that the target did not choose may be accepted. None, the default: lossless."""

    def couples(self, spec: SpecConfig) -> bool:
        """Whether drafts may look at the target's noise. A threshold's drafts must not depend on it."""
        return spec.num_steps > 0 and self.thresholds is None


LOSSLESS = CycleOptions()


def cycle(
    models: Models,
    state: State,
    rows: Int[Array, " b"],
    page_table: Int[Array, "b p"],
    *,
    spec: SpecConfig,
    options: CycleOptions = LOSSLESS,
) -> StepOutput:
    """Advances the sequences in these state rows by 1 .. num_steps + 1 tokens each.

    Before a cycle with a tree the head must not lag behind (extend.catch_up).
    """
    batch = gather(state, rows, page_table)
    coupling = couple(state, batch, spec.num_steps) if options.couples(spec) else None
    tree, root_logits = draft_tree(models, state, batch, spec, options.sliding_window, coupling)
    verified = verify(models, state, batch, tree, coupling and coupling.noise, options.thresholds)
    accepted = accept(tree, verified.target_tokens, batch, spec.num_steps)
    state = commit(state, batch, verified, accepted)
    state = advance(state, batch, accepted)
    state = extend(models, state, batch, verified, accepted, options.sliding_window)
    state = learn(models, state, batch, coupling, root_logits, verified.target_tokens[:, 0])
    drafted = Drafted(tree.tokens, tree.parents, accepted.path)
    return StepOutput(state, report(accepted), logprobs(verified, accepted, batch), drafted=drafted)


@jax.named_scope("logprobs")
def logprobs(verified: Verified, accepted: Accepted, batch: Batch) -> Logprobs:
    """The log probabilities of the emitted tokens; computed only if a running request of the batch wants them."""

    def compute() -> Logprobs:
        return logprobs_of(jnp.take_along_axis(verified.logits, accepted.path[:, :, None], 1), accepted.tokens)

    return logprobs_if(batch.settings.wants_logprobs & ~batch.sequences.done, compute)
