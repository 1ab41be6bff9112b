"""The engines of a sweep: they measure accept lengths, cycle times and whole passes of many trees.

All trees share one engine: a tree is just another program, and every request names its tree. Plain decoding has an engine without a
head, as it would have in production. Programs are compiled for the sweep's batch sizes only.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from jaxspec import SamplingParams
from jaxspec.commands.workbench import Pass, Workbench, run
from jaxspec.decoding.programs import CycleProgram
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationRequest, Status
from jaxspec.tree_shape import PLAIN, TreeShape

from .options import BenchmarkError
from .side_by_side import parts_of

TIMED_CYCLES = 12
"""The most cycles of one tree that are timed in a row."""
LEAST_CYCLES = 2
FIRST_CYCLES = 3
"""Cycles that are not timed, because other requests of the batch may still be in their prefill."""


class Sweep:
    """A model, its head and prompts, for every tree at every batch size."""

    def __init__(
        self,
        bench: Workbench,
        prompts: Sequence[Sequence[int]],
        trees: Sequence[TreeShape],
        batches: Sequence[int],
        params: Sequence[SamplingParams],
        **more: Any,
    ):
        self.prompts, self.trees, self.batches = prompts, list(trees), sorted(set(batches))
        self.params = list(params)
        """Of each prompt. They may be replaced by others of the same length."""
        self._max_tokens = max(each.max_tokens for each in params)
        sizes, (first, *others) = (self.batches[-1], bench.context_for(prompts, self._max_tokens)), self.trees
        self._plain = bench.engine(PLAIN, *sizes, prefix_cache=False)
        self._drafting = bench.engine(first, *sizes, prefix_cache=False, request_trees=tuple(others), **more)
        table = self._drafting.runner.table  # all trees at every batch size, which trees of single requests are not
        self._drafting.runner.table = replace(table, own=table.trees)
        self._restrict(self.batches)

    def _restrict(self, batches: Sequence[int]) -> None:
        """Pads every batch to one of these sizes, so that no other is compiled."""
        for engine in (self._plain, self._drafting):
            engine.runner.table = replace(engine.runner.table, batches=tuple(batches))

    def compile(self, trees: Sequence[TreeShape], batches: Sequence[int]) -> None:
        """Compiles the cycles of these trees and of plain decoding at these batch sizes. Prefills compile in the untimed passes."""
        for engine, specs in ((self._plain, [PLAIN]), (self._drafting, list(trees))):
            cycles = [each for each in engine.runner.table.all() if isinstance(each, CycleProgram) and each.batch in batches]
            engine.runner.programs.compile_all([each for each in cycles if each.tree in specs], progress=True)

    @property
    def calibration(self) -> tuple[float, ...]:
        """What sampled drafts have learnt about the head so far: the weights of decoding/coupling.py."""
        return tuple(self._drafting.runner.state.draft.calibration.weights.tolist())

    def accept(self, tree: TreeShape) -> Pass:
        """Runs all prompts once at the largest batch size."""
        self._restrict(self.batches[-1:])
        done = self.run_part(tree, self.batches[-1], range(len(self.prompts)))
        self._restrict(self.batches)
        return done

    def parts(self, batch: int) -> list[range]:
        """The parts of a round at this batch size, in which every prompt runs at least once."""
        return parts_of(len(self.prompts), batch)

    def run_part(self, tree: TreeShape, batch: int, part: range) -> Pass:
        """Runs these requests, `batch` at a time."""
        prompts, params = zip(*self._requests(part.stop)[part.start :], strict=True)
        return run(self._engine(tree), prompts, params, batch, tree)

    def _requests(self, count: int) -> list[tuple[Sequence[int], SamplingParams]]:
        """The first `count` of the endlessly repeated prompts, with their parameters."""
        return list(itertools.islice(itertools.cycle(zip(self.prompts, self.params, strict=True)), count))

    def cycle_seconds(self, tree: TreeShape, batch: int) -> float:
        """Median time of a cycle of `batch` requests in the middle of their texts."""
        engine, cycles = self._engine(tree), self.timed_cycles(tree)
        requests = [engine.add(GenerationRequest(tuple(prompt), params, tree=tree)) for prompt, params in self._requests(batch)]
        while any(request.generated < 2 for request in requests):
            engine.step()
        times: list[float] = []
        while len(times) < cycles and all(request.status is Status.RUNNING for request in requests):
            started = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - started)
        for request in requests:
            engine.abort(request.id)
        while engine.has_work:
            engine.step()
        if len(times) < LEAST_CYCLES:  # the first texts ended while the last prompts were computed
            raise BenchmarkError(f"--max-tokens is too small to time {batch} requests together with {tree}: increase it")
        return median(times)

    def timed_cycles(self, tree: TreeShape) -> int:
        """Cycles that surely fit between a request's first cycles and its last, even if every draft is accepted.

        Raises BenchmarkError if that is less than LEAST_CYCLES.
        """
        most = self._max_tokens // (tree.num_steps + 1) - FIRST_CYCLES
        if most < LEAST_CYCLES:
            least = (FIRST_CYCLES + LEAST_CYCLES) * (tree.num_steps + 1)
            raise BenchmarkError(f"--max-tokens {self._max_tokens} is too small to time cycles of {tree}: give at least {least}")
        return min(TIMED_CYCLES, most)

    def _engine(self, tree: TreeShape) -> Engine:
        return self._plain if tree == PLAIN else self._drafting
