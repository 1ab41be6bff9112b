"""One training batch of SafeAILab's EAGLE-3 trainer: losses, accuracies and gradients."""

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxspec.checkpoints.layouts import SAFEAILAB, eagle3_layout
from jaxspec.checkpoints.writing import tensors_of
from jaxspec.train import ttt
from jaxspec.train.ttt import TRAINING, Rows, teach, unroll
from tests.reference import FIXTURES, head, target
from tests.sets import exhaustive

STEPS = 7


@pytest.fixture(scope="module")
def batch():
    """The reference's numbers, the models and the rows."""
    numbers = dict(np.load(FIXTURES / "eagle_ref/out/train_e3_trained.npz"))
    ids = numbers["ids"].astype(np.int32)
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    return numbers, target(), head(), Rows(ids, numbers["attention_mask"].astype(np.int32), positions, numbers["loss_mask"] > 0)


@pytest.mark.variants
@pytest.mark.parametrize("chunk", [exhaustive(1024), 10])
def test_losses_and_gradients_are_safeailabs(batch, monkeypatch, chunk):
    """With logits made at once, and by chunks that don't divide the batch."""
    monkeypatch.setattr(ttt, "CHUNK", chunk)
    numbers, target, head, rows = batch
    params = dict(head.params)
    token_map = params.pop("draft_to_target")

    def losses(params):
        model, origin = head.merge({**params, "draft_to_target": token_map}, TRAINING), target.merge(target.params)
        out = unroll(model, origin, teach(origin, model.config.captured_layers, rows), rows, STEPS)
        return out.loss, out

    (loss, out), gradient = jax.jit(jax.value_and_grad(losses, has_aux=True))(params)
    np.testing.assert_allclose(out.losses, numbers["plosses"], atol=1e-5)
    np.testing.assert_allclose(loss, numbers["loss"], atol=1e-5)
    loss_mask = numbers["loss_mask"]
    learnt = [loss_mask[:, step:].sum() for step in range(STEPS)]
    choices = teach(target.merge(target.params), head.config.captured_layers, rows).choice
    members = np.isin(np.asarray(choices), np.asarray(token_map))
    right = np.stack([correct & ttt_shifted(members, step + 1) for step, correct in enumerate(np.asarray(out.correct))])
    np.testing.assert_allclose(right.sum((1, 2)) / learnt, numbers["accs"], atol=1e-5)

    layout = eagle3_layout(head.config, SAFEAILAB, has_token_map=False, has_members=False)
    layout = {keys: source for keys, source in layout.items() if keys != ("draft_to_target",)}
    assert flatten_dict(gradient).keys() == layout.keys()
    tensors = dict(tensors_of(layout, gradient))
    assert len(tensors) == sum(name.startswith("grad_norm:") for name in numbers)
    for name, tensor in tensors.items():
        np.testing.assert_allclose(np.linalg.norm(tensor), numbers[f"grad_norm:{name}"], rtol=1e-4, err_msg=name)
        some = tensor.ravel()[:: max(1, tensor.size // 64)][:64]
        np.testing.assert_allclose(some, numbers[f"grad_head:{name}"], atol=1e-4, err_msg=name)


def ttt_shifted(values, places):
    return np.concatenate([values[:, places:], np.zeros_like(values[:, :places])], 1)


@pytest.mark.variants
def test_packed_conversations_learn_as_alone(batch):
    """Two conversations in one row have the losses that they have in rows of their own."""
    _, target, head, rows = batch
    first, second = rows.tokens[0, :14], rows.tokens[1, :9]

    def alone(tokens, width):
        count = len(tokens)
        padded = np.zeros((1, width), np.int32)
        padded[0, :count] = tokens
        places = np.arange(width)[None]
        return Rows(padded, (places < count).astype(np.int32), places.astype(np.int32), (places > 3) & (places < count - 1))

    one, two = alone(first, 24), alone(second, 24)
    packed = jax.tree.map(np.copy, one)
    for into, source in zip(packed, (two.tokens, 2 * two.segments, two.positions, two.learnt), strict=True):
        into[0, 14:23] = source[0, :9]
    model, origin = head.merge(head.params, TRAINING), target.merge(target.params)

    @jax.jit
    def losses(rows):
        return unroll(model, origin, teach(origin, model.config.captured_layers, rows), rows, 4)

    together, apart = losses(packed), [losses(one), losses(two)]
    np.testing.assert_allclose(together.losses, apart[0].losses + apart[1].losses, rtol=1e-5)
    assert together.counted.sum() == apart[0].counted.sum() + apart[1].counted.sum() > 20


def test_behind_the_end_of_a_row_nothing_is_learnt(batch):
    """SafeAILab's trainer learns from a row's last position, if it is to be learnt, the argmax of its padding: token 0."""
    _, target, head, rows = batch
    rows = jax.tree.map(lambda part: part[:, :16], rows)  # whose last tokens are text
    learnt = np.ones_like(rows.learnt)
    learnt[:, -1] = False
    params = dict(head.params)
    params["draft_to_target"] = params["draft_to_target"].at[0].set(0)
    model, origin = head.merge(params, TRAINING), target.merge(target.params)

    @jax.jit
    def losses(rows):
        return unroll(model, origin, teach(origin, model.config.captured_layers, rows), rows, 2).losses

    expected = losses(rows._replace(learnt=learnt))
    np.testing.assert_array_equal(losses(rows._replace(learnt=np.ones_like(learnt))), expected)
    assert (np.asarray(expected) > 0).all()
