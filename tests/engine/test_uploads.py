"""What launches copy to the device: nothing for a batch that has not changed."""

import jax
import pytest

from jaxspec.config import PLAIN, TreeShape
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationRequest, Status
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import random_eagle, tiny_engine, tiny_target

PAGE = 32

TREE = TreeShape(1, 2, 2)


def running(*trees: TreeShape, overlap: bool = True) -> Engine:
    """An engine with a running request for each of the trees. Programs are compiled once for all of them."""
    small = tiny_target(num_layers=2)
    engine = tiny_engine(
        TREE, target=small, head=random_eagle(small.config), request_trees=(PLAIN,), page_size=PAGE, overlap=overlap
    )
    params = SamplingParams(max_tokens=120, temperature=0)
    requests = [engine.add(GenerationRequest([3, 1, 4, *range(place)], params, tree=tree)) for place, tree in enumerate(trees)]
    while any(request.status is not Status.RUNNING or request.generated < 3 for request in requests):
        engine.step()
    return engine


def uploads_of_steps(engine: Engine, steps: int) -> list[int]:
    """Arrays that each step copies."""
    uploads = []
    for _ in range(steps):
        before = engine.stats()
        engine.step()
        after = engine.stats()
        uploads.append(after.uploaded_arrays - before.uploaded_arrays)
        assert (uploads[-1] > 0) == (after.uploaded_bytes > before.uploaded_bytes)
    return uploads


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("trees", [(TREE, TREE), (PLAIN,), (TREE, PLAIN)])
def test_cycles_of_the_same_batch_copy_nothing(trees, overlap):
    """Also where each step has a cycle of each tree."""
    engine = running(*trees, overlap=overlap)
    with jax.transfer_guard_host_to_device("disallow_explicit"):  # JAX itself would raise
        assert not any(uploads_of_steps(engine, 8))
    assert engine.stats().running == len(trees) and engine.stats().failed_steps == 0


def test_the_guard_sees_a_copy():
    engine = running(TREE, TREE)
    engine.abort(engine.scheduler.admitted[0].id)
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        updates = engine.step()
    assert any("isallowed host-to-device transfer" in update.output.error for update in updates if update.output)


def test_a_page_more_is_one_array_more():
    """A page table is copied when a sequence enters a new page, and the rows are not copied with it."""
    engine = running(TREE)
    (request,) = engine.scheduler.admitted
    before = request.generated
    uploads = uploads_of_steps(engine, 60)
    entered = (request.generated - before) // PAGE
    assert entered >= 1 and sum(uploads) == uploads.count(1) and sum(uploads) in (entered, entered + 1)
