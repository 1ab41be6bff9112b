"""What launches copy to the device: nothing for a batch that has not changed."""

import jax
import numpy as np
import pytest

from jaxspec.decoding.programs import CycleProgram
from jaxspec.engine import placed
from jaxspec.engine.engine import Engine
from jaxspec.engine.placed import MOST_ENTRIES, PlacedInputs
from jaxspec.engine.request import GenerationRequest, Status
from jaxspec.placement import ONE_DEVICE
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import random_eagle, tiny_engine, tiny_target
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.engine.served import updates_of
from tests.sets import variants

PAGE = 32

TREE = TreeShape(1, 2, 2)


def running(*trees: TreeShape, overlap: bool = True) -> Engine:
    """An engine with a running request for each of the trees. Programs are compiled once for all of them."""
    small = tiny_target(num_layers=2)
    head = random_eagle(small.config)
    engine = tiny_engine(TREE, target=small, head=head, request_trees=(PLAIN,), page_size=PAGE, overlap=overlap)
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


@pytest.mark.variants
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("trees", [(TREE, TREE), (PLAIN,), (TREE, PLAIN)])
def test_cycles_of_the_same_batch_copy_nothing(trees, overlap):
    """Also where each step has a cycle of each tree."""
    engine = running(*trees, overlap=overlap)
    with jax.transfer_guard_host_to_device("disallow_explicit"):  # JAX itself would raise
        assert not any(uploads_of_steps(engine, 8))
    assert engine.stats().running == len(trees) and engine.stats().failed_steps == 0


@pytest.mark.variants
def test_a_page_more_is_one_array_more():
    """A page table is copied when a sequence enters a new page, and the rows are not copied with it."""
    engine = running(TREE)
    (request,) = engine.scheduler.admitted
    before = request.generated
    uploads = uploads_of_steps(engine, 60)
    entered = (request.generated - before) // PAGE
    assert entered >= 1 and sum(uploads) == uploads.count(1) and sum(uploads) in (entered, entered + 1)


LARGE, CYCLE = (8, 4096), CycleProgram(8, 4096, PLAIN)


class Uploads:
    """Inputs of one program, and the bytes of each copy."""

    def __init__(self):
        self.bytes: list[int] = []
        self.inputs = PlacedInputs(ONE_DEVICE, lambda array: self.bytes.append(array.nbytes))

    def put(self, values: np.ndarray) -> jax.Array:
        found = self.inputs.get(CYCLE, "page table", values).array
        np.testing.assert_array_equal(found, values)
        return found


@pytest.mark.parametrize("changed", [1, 8, MOST_ENTRIES, MOST_ENTRIES + 1])
def test_of_a_large_table_only_the_entries_that_changed_are_sent(changed):
    """They are written in place, so that the table does not move. Many changes, and a first table, are sent whole."""
    uploads, rng = Uploads(), np.random.default_rng(changed)
    uploads.inputs.compile_for(LARGE)
    table = rng.integers(0, 1 << 20, LARGE, np.int32)
    uploads.put(table)
    at = []
    for _ in range(2):
        table = table.copy()
        table.reshape(-1)[rng.choice(table.size, changed, replace=False)] += 1
        written = uploads.put(table)
        at.append(written.unsafe_buffer_pointer())  # of the first table on a CPU it may be NumPy's, which can't be written to
        assert uploads.put(table.copy()) is written
    if changed <= MOST_ENTRIES:
        assert uploads.bytes == [table.nbytes, 8 * MOST_ENTRIES, 8 * MOST_ENTRIES] and at[0] == at[1]
    else:
        assert uploads.bytes == [table.nbytes] * 3


def test_small_tables_and_those_that_nothing_was_compiled_for_are_sent_whole():
    for shape, is_compiled in (((8, 1024), True), (LARGE, False)):
        uploads, table = Uploads(), np.zeros(shape, np.int32)
        if is_compiled:
            uploads.inputs.compile_for(shape)
        uploads.put(table)
        uploads.put(table + 1)
        assert uploads.bytes == [table.nbytes, table.nbytes]


@pytest.mark.parametrize("overlap", [True, variants(False)])
def test_a_table_that_is_written_to_gives_the_same_text(monkeypatch, overlap):
    def text() -> list[int]:
        engine = running(TREE, TREE, overlap=overlap)
        requests = engine.scheduler.admitted[:]
        updates_of(engine)
        return [token for request in requests for token in request.output]

    expected = text()
    monkeypatch.setattr(placed, "SENT_WHOLE", 0)
    assert text() == expected and len(expected) == 240
