"""A cycle in two programs, with the host in between: the same tokens, and only tokens that its masks allow."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.cycle import Proposal
from jaxspec.decoding.programs import ProposeProgram, Settlement, SettleProgram
from jaxspec.decoding.tree import Chain, as_candidates, merge, rank
from jaxspec.decoding.verify import unpack
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationRequest, Request
from jaxspec.sampling_params import SamplingParams
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.engine.served import updates_of
from tests.grammar.cases import TREES, engine
from tests.sets import exhaustive

PROMPTS = [(3, 1, 4, 1, 5), tuple(range(20, 50))]
TREE = TREES[0]  # as tests/grammar has it: the same programs
KINDS = [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.8, "presence_penalty": 0.7, "seed": 4}]
ALLOWED = [5, 17, 33, 64, 100, 127]


def requests_of(made: Engine, **options) -> list[Request]:
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **kind, **options) for kind in KINDS]
    return [made.add(GenerationRequest(prompt, each)) for prompt in PROMPTS for each in params]


def run(made: Engine, **options) -> list[list[int]]:
    requests = requests_of(made, **options)
    updates_of(made)
    return [request.output for request in requests]


def run_in_two(made: Engine, between: Callable[[Proposal], Settlement], mask: np.ndarray | None = None) -> list[list[int]]:
    """The engine's loop with launches in two; `mask` [words]: of the first token."""
    requests, runner = requests_of(made), made.runner
    while made.scheduler.has_work:
        plan, launched = made.scheduler.plan(made.trees.most_emitted), []
        if plan.cycle:
            half = runner.launch_proposal(plan.cycle, made.tree)
            launched.append(runner.launch_settlement(half, between(half.proposal)))
        for chunk in plan.prefills:
            if chunk.request in plan.newly_admitted:
                runner.launch_admission(chunk.request)
            if mask is not None:
                runner.launch_mask(chunk.request, mask)
            launched.append(runner.launch_prefill([chunk]))
        for program in launched:
            if program.most_emitted:
                for request, new in zip(program.requests, runner.read(program), strict=True):
                    made.output.add(request, new, program.tree)
    return [request.output for request in requests]


def packed(allowed: list[int], *shape: int) -> np.ndarray:
    """The same mask everywhere: [*shape, words]."""
    bits = np.zeros(128, bool)
    bits[allowed] = True
    words = np.packbits(bits, bitorder="little").view(np.uint32)
    return np.broadcast_to(words, (*shape, len(words))).copy()


def free(proposal: Proposal) -> Settlement:
    """Under masks that allow all tokens."""
    return Settlement.of(proposal, packed(list(range(128)), *proposal.tree.tokens.shape))


@pytest.mark.variants
@pytest.mark.parametrize("tree", [TREE, exhaustive(TreeShape(2, 1)), exhaustive(PLAIN)], ids=str)
def test_two_programs_say_what_one_says(tree):
    expected = run(engine(tree))
    made = engine(tree)
    assert run_in_two(made, free) == expected
    programs = made.runner.programs.compilations
    assert {type(each) for each in programs} >= {ProposeProgram, SettleProgram} and not any(
        each in made.runner.table.all() for each in programs if isinstance(each, (ProposeProgram, SettleProgram))
    ), "a start compiles no halves"


@pytest.mark.variants
def test_the_host_gets_whole_trees_where_rows_have_a_cost():
    """All their nodes will be verified: see ProposeProgram."""
    proposed = {}
    for row_cost in (0.0, 0.9):
        seen = proposed[row_cost] = list[np.ndarray]()

        def note(proposal: Proposal, seen: list[np.ndarray] = seen) -> Settlement:
            seen.append(np.asarray(proposal.tree.tokens))
            assert proposal.tree.pays is None
            return free(proposal)

        run_in_two(engine(TREE, row_cost=row_cost), note)
    assert all((one == other).all() for one, other in zip(*proposed.values(), strict=True))


@pytest.mark.variants
def test_the_host_may_add_candidates_of_its_own():
    """It ranks them with the drafter's; text stays the same, whatever it proposes."""
    trees = []

    def with_a_guess(proposal: Proposal) -> Settlement:
        root = proposal.tree.tokens[:, 0]
        guess = as_candidates(Chain(jnp.broadcast_to(root[:, None] + jnp.arange(1, 4), (len(root), 3)) % 128))
        ranked = rank(root, merge([as_candidates(proposal.candidates), guess], TREE.num_steps), TREE)
        trees.append((np.asarray(root), np.asarray(ranked.tokens)))
        return free(proposal)._replace(tokens=np.asarray(ranked.tokens), parents=np.asarray(ranked.parents))

    assert run_in_two(engine(TREE), with_a_guess) == run(engine(TREE))
    for root, tokens in (pair for each in trees for pair in zip(*each, strict=True)):
        assert {*range(root + 1, root + 4)} <= {*tokens, *range(128, 131)}


@pytest.mark.variants
@pytest.mark.parametrize("tree", [TREE, PLAIN], ids=str)
def test_masked_text_is_that_of_allowed_tokens(tree):
    """The mask of the first token is the row's."""

    def masked(proposal: Proposal) -> Settlement:
        return Settlement.of(proposal, packed(ALLOWED, *proposal.tree.tokens.shape))

    expected = run(engine(tree), allowed_token_ids=ALLOWED)
    assert run_in_two(engine(tree), masked, packed(ALLOWED)) == expected
    assert {token for output in expected for token in output} <= set(ALLOWED)


@pytest.mark.variants
def test_masks_may_differ_from_node_to_node():
    """Only 7 may follow a 9, only 9 anything else: after any tree the text alternates."""

    def masked(proposal: Proposal) -> Settlement:
        tokens = np.asarray(proposal.tree.tokens)
        return Settlement.of(proposal, np.where((tokens == 9)[..., None], packed([7], 1, 1), packed([9], 1, 1)))

    for output in run_in_two(engine(TREE), masked, packed([9])):
        assert output == [9, 7] * 12


def test_the_bits_of_a_mask():
    assert unpack(jnp.array([[[5]]], jnp.uint32), 4).tolist() == [[[True, False, True, False]]]
    allowed = sorted(np.random.default_rng(0).choice(128, 50, replace=False).tolist())
    assert np.flatnonzero(unpack(jnp.asarray(packed(allowed, 1, 1)), 128)).tolist() == allowed
