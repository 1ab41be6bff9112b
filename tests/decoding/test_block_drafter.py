"""Block heads: what their authors' code drafts, the best trees, and the text of plain decoding whatever they propose."""

import itertools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints.loading import load_head, load_target
from jaxspec.checkpoints.writing import write_checkpoint
from jaxspec.decoding.block_drafter import BlockDrafter, Children, behind, best_texts, block_logits, chain, view
from jaxspec.decoding.drafter import Merged, NewTokens
from jaxspec.decoding.ngram import NgramDrafter
from jaxspec.decoding.state import Sequences, Sizes, State, gather, put_sequences
from jaxspec.decoding.tree import Tree, rank
from jaxspec.engine.engine import Engine
from jaxspec.engine.models import new_state
from jaxspec.engine.request import GenerationRequest
from jaxspec.models.layers import causal_metadata
from jaxspec.models.linear import Kernels
from jaxspec.models.registry import LoadedTarget
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import engine_target, random_block, tiny_engine
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.engine.served import served, updates_of
from tests.reference import FIXTURES
from tests.sets import exhaustive

BLOCKS = FIXTURES / "block_heads"
HEADS = ("markov_head.", "confidence_head.")
"""What DeepSpec's DSpark has and its DFlash does not."""
OTHERS = [("windows", 40), ("dflash", 5), ("dflash", 40), ("dspark", 5), ("deepspec", 40), ("jetspec", 5), ("jetspec", 40)]
CAPTURED = (1, 2)
PAGE, LENGTH = 4, 64
TARGET = engine_target()
PROMPTS = [(3, 1, 4, 1, 5), tuple(range(20, 50)), (64, 2)]
KINDS = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.9, "top_p": 0.8, "presence_penalty": 0.7, "seed": 4},
]


# Beside the authors' code


def published(name: str, directory: Path) -> Path:
    """A head in the published layout, with the config of this case."""
    source = BLOCKS / ("dspark" if name in ("dspark", "deepspec") else "dflash")
    shutil.copytree(source, directory / name)
    if name == "deepspec":
        config = json.loads((source / "config.json").read_text()) | {"markov_rank": 0, "enable_confidence_head": False}
        tensors = load_file(source / "model.safetensors").items()
        write_checkpoint(directory / name, config, [each for each in tensors if not each[0].startswith(HEADS)])
    if (config := source / f"{name}.json").exists():
        shutil.copy(config, directory / name / "config.json")
    return directory / name


def state_with(drafter: BlockDrafter, target: LoadedTarget, length: int, root: jax.Array) -> State:
    """One row with this text; its pages hold NaN."""
    state = new_state(target.config, drafter, Sizes(1, LENGTH // PAGE, PAGE, LENGTH, 1, jnp.float32))
    poison = jax.tree.map(lambda array: jnp.full_like(array, jnp.nan), state.draft.cache)
    state = state._replace(draft=state.draft._replace(cache=poison))
    numbers = (jnp.asarray(each, jnp.int32)[None] for each in (length, root, LENGTH))
    return put_sequences(state, jnp.array([0]), Sequences.of(*numbers, jnp.array([False])))


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    """Also what DeepSpec's DFlash drafts: its DSpark's logits without the biases."""
    found, tensors = dict(np.load(BLOCKS / "golden.npz")), load_file(BLOCKS / "dspark/model.safetensors")
    before, after = (tensors[f"markov_head.markov_w{number}.weight"] for number in (1, 2))
    for start in (5, 40):
        tokens = np.r_[found["ids"][:, start], found[f"dspark_tokens_{start}"][:-1]]
        logits = found[f"dspark_logits_{start}"] - before[tokens] @ after.T
        found |= {f"deepspec_logits_{start}": logits, f"deepspec_tokens_{start}": logits.argmax(-1)}
    return found


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return load_target(FIXTURES / "targets/qwen3", jnp.float32)


@pytest.fixture(scope="module")
def features(golden, target) -> jax.Array:
    """What the heads read of the target at each position."""
    ids = jnp.asarray(golden["ids"], jnp.int32)
    return jax.jit(lambda: target.merge(target.params)(ids, causal_metadata(*ids.shape), capture=CAPTURED).features)()


@pytest.mark.parametrize(
    ("name", "start"), [("windows", 5), ("dspark", 40), ("deepspec", 5), *(exhaustive(*each) for each in OTHERS)]
)
def test_drafts_are_those_of_the_authors_code(golden, target, features, tmp_path, name, start):
    """The features come in chunks, the last one of one token, and slots that were never written hold NaN, which one of both
    implementations of attention would pass on."""
    kernels = Kernels(attention="reference" if start == 5 else None)
    drafter = BlockDrafter.of(load_head(published(name, tmp_path), target), kernels)
    ids, expected = golden["ids"], golden[f"{name}_tokens_{start}"]
    assert drafter.capture == CAPTURED

    @jax.jit
    def run(ids: jax.Array, features: jax.Array, expected: jax.Array) -> tuple[jax.Array, ...]:
        module = target.merge(target.params)
        state = state_with(drafter, target, start, ids[0, start])
        batch = gather(state, jnp.array([0]), jnp.arange(LENGTH // PAGE)[None, ::-1])
        for first, end in ((1, start), (start, start + 1)):
            numbers = (jnp.array([each], jnp.int32) for each in (first, first, end - first))
            new = NewTokens(ids[:, first:end], features[:, first - 1 : end - 1], *numbers)
            state = state._replace(draft=drafter.absorb(module, state, batch, new))
        head = drafter.head
        logits = block_logits(head, module, state, batch, 5)
        before = jnp.concatenate([ids[:, start], expected[:-1]])
        own = jnp.stack([behind(head, logits, level, before[None, level : level + 1])[0, 0] for level in range(5)])
        # Where no position sees a later one, a chain of two leaves out the others.
        of_two = block_logits(head, module, state, batch, 2) if all(drafter.config.causal) else logits[:, :2]
        return chain(head, logits, batch.sequences.root, None).tokens, own, logits, of_two

    tokens, own, logits, of_two = run(jnp.asarray(ids, jnp.int32), features, jnp.asarray(expected, jnp.int32))
    assert tokens[0].tolist() == expected.tolist()
    np.testing.assert_allclose(own, golden[f"{name}_logits_{start}"], atol=1e-4)
    np.testing.assert_allclose(of_two, logits[:, :2], atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_is_exact_at_every_length(causal):
    """What a position sees, as positions of the text, from the cache's range and the edge."""
    window, width, lengths = 9, 5, np.arange(1, 40)
    pages = jnp.broadcast_to(jnp.arange(LENGTH // PAGE), (len(lengths), LENGTH // PAGE))
    views = jax.jit(view, static_argnums=(2, 3, 4, 5))
    seen, edge = jax.tree.map(np.asarray, views(jnp.asarray(lengths), pages, PAGE, width, causal, window))
    for row, length in enumerate(lengths.tolist()):
        slots = (seen.page_table[row][:, None] * PAGE + np.arange(PAGE)).ravel()
        of_cache = slots[seen.start[row] : seen.length[row]].tolist()
        for place in range(width):
            on_edge, of_block = np.split(seen.mask[row, place], [width - 1])
            found = sorted(slot - 1 for slot in [*of_cache, *edge[row][on_edge].tolist()])
            assert found == [each for each in range(length) if length + place - each < window]
            assert np.flatnonzero(of_block).tolist() == list(range(place + 1 if causal else width))


# Trees


@pytest.mark.parametrize(
    "shape", [TreeShape(3, 3, 11), exhaustive(TreeShape(5, 2, 11)), exhaustive(TreeShape(3, 4, 30)), exhaustive(TreeShape(4, 3, 3))]
)
def test_the_tree_is_that_of_the_best_texts(shape):
    """Of all texts that the positions spell, by brute force; and no chain with as many nodes is expected to be accepted further."""
    rng, steps, k, count = np.random.default_rng(0), shape.num_steps, shape.topk, shape.num_draft_tokens - 1

    @jax.jit
    def tree_of(tokens: jax.Array, log_probs: jax.Array) -> Tree:
        root = jnp.array([99])
        return rank(root, best_texts(children_of(tokens, log_probs), root, steps, count, count), shape)

    for _ in range(5):
        log_probs = np.log(np.sort(rng.dirichlet(np.full(k + 2, 0.5), steps) + 1e-6)[:, ::-1][:, :k]).astype(np.float32)
        tokens = np.stack([rng.permutation(50)[:k] for _ in range(steps)]).astype(np.int32)
        tree = tree_of(tokens, log_probs)
        every = [places for depth in range(1, steps + 1) for places in itertools.product(range(k), repeat=depth)]
        scores = {
            tuple(tokens[level, place] for level, place in enumerate(places)): sum(
                float(log_probs[level, place]) for level, place in enumerate(places)
            )
            for places in every
        }
        texts: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.tokens[0, 1:].tolist(), tree.parents[0, 1:].tolist(), strict=True):
            texts.append((*texts[parent], token))
        assert len(set(texts)) == shape.num_draft_tokens, "each once"
        found = [scores[text] for text in texts[1:]]
        assert sorted(found, reverse=True) == pytest.approx(sorted(scores.values(), reverse=True)[:count], abs=1e-5)
        greedy = np.cumsum(log_probs[:, 0])[:count]
        assert np.exp(found).sum() >= np.exp(greedy).sum() - 1e-5


def children_of(tokens: jax.Array, log_probs: jax.Array) -> Children:
    """The same children of every text: tokens and log probabilities [steps, k]."""

    def children(level: int, before: jax.Array) -> tuple[jax.Array, jax.Array]:
        shape = (*before.shape, tokens.shape[1])
        return jnp.broadcast_to(tokens[level], shape), jnp.broadcast_to(log_probs[level], shape)

    return children


def test_the_docstrings_example_of_best_texts():
    children = children_of(jnp.array([[5, 6]] * 2), jnp.array([[-0.1, -2.4]] * 2))
    found = jax.jit(lambda root: best_texts(children, root, 2, 3, 3))(jnp.array([0]))
    assert found.tokens.tolist() == [[5, 6, 5, 6]] and found.parents.tolist() == [[-1, -1, 0, 0]]
    assert found.scores[0].tolist() == pytest.approx([-0.1, -2.4, -0.2, -2.5])


# Texts


def run(engine: Engine, *trees: TreeShape, max_tokens: int = 40) -> list[list[int]]:
    """The texts of all prompts and kinds, each again with these trees of the engine."""
    params = [SamplingParams(max_tokens=max_tokens, **kind) for kind in KINDS]
    asked = [GenerationRequest(prompt, each, tree=tree) for tree in (None, *trees) for prompt in PROMPTS for each in params]
    return [request.output for request in served(engine, *asked)]


@pytest.mark.variants
def test_a_text_is_the_same_with_and_without_the_tree():
    """Again with the first time's pages in the cache, and where requests are preempted. One layer compiles fastest."""
    target, options = engine_target(num_layers=1), {"num_pages": 16, "context_length": 60, "request_trees": (PLAIN,)}
    head = random_block(target.config, layer={"num_layers": 1}, causal=(False,), windows=(9,))
    engine = tiny_engine(TreeShape(4, 2, 7), target=target, head=head, **options)
    for _ in range(2):
        drafted, plain = np.split(np.array(run(engine, PLAIN, max_tokens=24)), 2)
        assert drafted.tolist() == plain.tolist()
    stats = engine.stats()
    assert stats.accepted_tokens and stats.prefix_hit_tokens and stats.preemptions


def trees_of(engine: Engine) -> list[tuple[int, ...]]:
    engine.add(GenerationRequest(PROMPTS[1], SamplingParams(max_tokens=12, temperature=0), wants_trees=True))
    verifications = [update.verification for update in updates_of(engine)]
    return [each.tree.tokens for each in verifications if each is not None and each.tree is not None]


@pytest.mark.variants
def test_pages_follow_the_text():
    """However tokens come (one chunk, several, a prefix hit), the head finds the same features, so it drafts the same trees."""
    head, tree = random_block(TARGET.config, causal=(True, False), windows=(9, 7)), TreeShape(5, 3, 12)
    whole, chunked = (tiny_engine(tree, target=TARGET, head=head, prefill_chunk=chunk) for chunk in (64, 5))
    trees = trees_of(whole)
    assert trees and trees_of(chunked) == trees
    assert trees_of(whole) == trees and whole.stats().prefix_hit_tokens > 0


def test_what_a_block_can_not_do_is_refused():
    head = random_block(TARGET.config)
    with pytest.raises(ValueError, match="num_steps=6 is more than the 5 tokens that a block drafts"):
        tiny_engine(TreeShape(6, 2, 5), target=TARGET, head=head)
    with pytest.raises(ValueError, match="draft_window_size is not supported for a DFLASH head"):
        tiny_engine(TreeShape(5, 2, 5), target=TARGET, head=head, draft_window_size=8)
    with pytest.raises(ValueError, match="head_steps=6 is more than the 5 tokens that a block drafts: lower it"):
        tiny_engine(TreeShape(7, 2, 5, 6), target=TARGET, head=head, ngram=True)
    deeper = Merged((BlockDrafter.of(head), NgramDrafter()))
    assert deeper.traits.max_steps is None and Merged((BlockDrafter.of(head),) * 2).traits.max_steps == 5
