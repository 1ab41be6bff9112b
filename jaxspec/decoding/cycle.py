"""One cycle of speculative decoding: draft a tree, verify it, commit the accepted tokens, let the drafter absorb them.

This is the whole algorithm; each stage has its own file. Plain decoding is the same cycle with an empty tree (num_steps = 0).
All sizes are static, so a cycle is one compiled program, or two where the host adds something in between: masks of the tree's
tokens (from a grammar), or candidates of its own. docs/structure.md follows one token through it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.decoding.commit import advance, commit
from jaxspec.decoding.drafter import DraftUse, Models, NoDrafter
from jaxspec.decoding.extend import extend
from jaxspec.decoding.sampling import Logprobs, logprobs_if, logprobs_of
from jaxspec.decoding.state import Batch, Drafted, ProgramOutput, State, gather
from jaxspec.decoding.tree import Candidates, Chain, Tree, rank, worth_a_row
from jaxspec.decoding.verify import Accepted, Verified, accept, report, verify
from jaxspec.tree_shape import TreeShape
from jaxspec.typing import Array, Int, UInt


class Proposal(NamedTuple):
    """What is to be verified."""

    tree: Tree
    memo: Any
    """The drafter's (Draft.memo)."""
    candidates: Candidates | Chain | None = None
    """All candidates that were ranked, for a host that ranks them again with its own."""


def cycle(models: Models, state: State, rows: Int[Array, " b"], page_table: Int[Array, "b p"], tree: TreeShape) -> ProgramOutput:
    """Advances the sequences in these state rows by 1 .. num_steps + 1 tokens each.

    Before a cycle with a tree the drafter must not lag behind (extend.catch_up).
    """
    batch = gather(state, rows, page_table)
    proposal = propose(models, state, batch, tree)
    return settle(models, state, batch, proposal, tree.num_steps)


def propose(models: Models, state: State, batch: Batch, tree: TreeShape) -> Proposal:
    """The best tree that the drafter knows below each root. It may look at the target's noise, unless thresholds are set: a
    threshold's drafts must not depend on it."""
    drafter = models.drafter if tree.num_steps else NoDrafter()
    is_lossless = models.thresholds is None
    worth = worth_a_row(models.row_cost, batch.sequences.done) if models.row_cost and tree.num_steps else None
    draft = drafter.propose(models.target, state, batch, tree, DraftUse(is_lossless, worth=worth))
    ranked = rank(batch.sequences.root, draft.candidates, tree, worth)
    return Proposal(ranked, draft.memo, draft.candidates)


def settle(
    models: Models,
    state: State,
    batch: Batch,
    proposal: Proposal,
    num_steps: int,
    masks: UInt[Array, "b n words"] | None = None,
) -> ProgramOutput:
    """Verifies the tree and moves the sequences on. `masks`: a bit for each token that may follow a node (verify.unpack)."""
    tree = proposal.tree
    verified = verify(models, state, batch, tree, masks)
    accepted = accept(tree, verified.target_tokens, batch, num_steps)
    state = commit(state, batch, verified, accepted)
    state = advance(state, batch, accepted)
    state = extend(models, state, batch, verified, accepted)
    if masks is None:  # what the target chooses under a mask says little of what it would choose
        state = learn(models, state, batch, proposal, verified)
    drafted = Drafted(tree.verified, tree.parents, accepted.path)
    return ProgramOutput(state, report(accepted, tree), logprobs(verified, accepted, batch), drafted=drafted)


def learn(models: Models, state: State, batch: Batch, proposal: Proposal, verified: Verified) -> State:
    """The drafter learns from the target's choices after the roots, but not where there are masks."""
    batch = batch._replace(sequences=batch.sequences.replaced(done=batch.sequences.done | batch.settings.masked))
    chosen = verified.target_tokens[:, 0]
    return state._replace(draft=models.drafter.learn(state, batch, proposal.memo, chosen))


@jax.named_scope("logprobs")
def logprobs(verified: Verified, accepted: Accepted, batch: Batch) -> Logprobs:
    """The log probabilities of the emitted tokens; computed only if a running request of the batch wants them."""

    def compute() -> Logprobs:
        return logprobs_of(jnp.take_along_axis(verified.logits, accepted.path[:, :, None], 1), accepted.tokens)

    return logprobs_if(batch.settings.wants_logprobs & ~batch.sequences.done, compute)
