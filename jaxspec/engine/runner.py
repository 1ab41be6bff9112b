"""The device side of the engine: weights, state, and launching programs on them."""

import logging
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.config import EngineConfig
from jaxspec.decoding.cycle import Proposal
from jaxspec.decoding.drafter import Drafter
from jaxspec.decoding.programs import (
    AdmitProgram,
    BatchProgram,
    CatchUpProgram,
    CycleProgram,
    LendProgram,
    MaskProgram,
    Program,
    ProposeProgram,
    Settlement,
    SettleProgram,
)
from jaxspec.decoding.state import Sizes, State, words_of
from jaxspec.engine.device import addressable_pages, check_kernel, memory_limit
from jaxspec.engine.host_group import ALONE, HostGroup
from jaxspec.engine.inputs import admission, padded_table, prefill_chunk
from jaxspec.engine.launched import Launched, emitted, token_logprobs
from jaxspec.engine.memory import CacheSize, DeviceMemory, readable
from jaxspec.engine.models import Merger, kernels_of, new_state, thresholds_of
from jaxspec.engine.output import Emitted
from jaxspec.engine.placed import Placed, PlacedInputs, leaves_to_send
from jaxspec.engine.prefill_groups import grouped
from jaxspec.engine.program_table import ProgramTable
from jaxspec.engine.programs import LATER, ProgramError, Programs
from jaxspec.engine.request import Request, TokenLogprob
from jaxspec.engine.scheduler import PrefillChunk
from jaxspec.engine.trees import MAX_LAG, TreeChoice
from jaxspec.models.registry import LoadedTarget
from jaxspec.placement import Placement
from jaxspec.tree_shape import TreeShape

logger = logging.getLogger(__name__)


class Start(NamedTuple):
    """How an engine starts."""

    progress: bool = False
    """Show the progress where the start compiles programs."""
    memory_limit: int | None = None
    """Bytes on the device that the engine may plan with. None: what JAX may use, or on a CPU what is available (host_memory)."""
    group: HostGroup = ALONE
    """The other processes that run it, if this one leads them."""


DEFAULT_START = Start()


class Half(NamedTuple):
    """The launched first half of a cycle."""

    requests: list[Request]
    proposal: Proposal
    settle: SettleProgram
    """The second half."""
    rows: Placed
    page_table: Placed
    """Its inputs."""


class Runner:
    """Owns everything on the device. The state that a launch donates is replaced by its result at once.

    The cache is allocated at the first launch. Until then compiling has the memory for itself: XLA's autotuner runs products
    with arrays of their real sizes.
    """

    def __init__(
        self,
        target: LoadedTarget,
        drafter: Drafter,
        trees: TreeChoice,
        config: EngineConfig,
        context_length: int,
        start: Start = DEFAULT_START,
    ):
        """Raises ValueError if the memory is too small, and ProgramError if a program can't be compiled."""
        self.placement, self.group = placement, group = Placement.of(config.tp_size), start.group
        check_kernel(config.attention_kernel, placement.device)
        self.params = {"target": placement.weights(target.params, target.config), "draft": drafter.placed(placement.weights)}
        pages_per_sequence = -(-context_length // config.page_size)
        table = ProgramTable.of(config, pages_per_sequence, trees.own, trees.all, catches_up=trees.lags)
        # One more row than requests. It is always done, and pads batches.
        self._padding_row, self._page_size = config.max_running_requests, config.page_size
        sizes = Sizes(
            rows=self._padding_row + 1,
            num_pages=0,
            page_size=config.page_size,
            max_length=context_length,
            max_lag=MAX_LAG if trees.lags else 1,
            dtype=target.dtype,
            kv_cache_dtype=config.kv_cache_dtype,
            devices=len(placement.devices),
        )
        self._vocab_size, self._max_length = target.config.vocab_size, context_length
        self.no_bias = placement.put(np.zeros((1, self._vocab_size), np.float32))
        self.merge = merge = Merger.of(target.graph(kernels_of(config)), drafter, thresholds_of(config), config.row_cost or 0.0)

        def state_of(num_pages: int) -> State:
            return new_state(target.config, drafter, sizes._replace(num_pages=num_pages))

        one_page, no_pages = (placement.abstract(partial(state_of, pages)) for pages in (1, 0))
        rows = placement.nbytes(no_pages)
        page_bytes = placement.nbytes(one_page) - rows
        most_pages = math.inf if placement.device.platform == "cpu" else addressable_pages(one_page)
        if config.num_pages is not None and config.num_pages > most_pages:
            raise ValueError(f"num_pages must be at most {most_pages} with an 8-bit cache of this model, got {config.num_pages}")

        def programs_for(num_pages: int) -> Programs:
            state = placement.abstract(partial(state_of, num_pages))
            programs = Programs(merge, self.params, state, table, placement, group)
            if group is not ALONE:
                group.pages(num_pages, programs.digest(self.params))
            return programs

        def compile_for(num_pages: int) -> Programs:
            programs = programs_for(num_pages)
            programs.compile_all(table.largest_of_all(), progress=start.progress)
            return programs

        cache = CacheSize(page_bytes, config.page_size, pages_per_sequence, config.max_running_requests, most_pages)
        held, limit = placement.nbytes(self.params), start.memory_limit
        if limit is None and config.num_pages is None:
            limit = memory_limit(placement.device)
        if limit is not None and config.num_pages is None:
            memory = DeviceMemory(limit, held, rows)
            self.num_pages, self.programs = memory.fit(cache, config.mem_fraction, compile_for)
        else:
            self.num_pages = config.num_pages or DeviceMemory.of_host(held, rows).steady_pages(cache, config.mem_fraction)
            self.programs = programs_for(self.num_pages)
            logger.debug(
                "memory: weights %s, cache %s in %d pages",
                readable(held), readable(self.num_pages * page_bytes), self.num_pages,
            )  # fmt: skip
        self._new_state = partial(placement.new, partial(state_of, self.num_pages))
        self.cache_bytes = self.num_pages * page_bytes
        self._state: State | None = None
        self.inputs = PlacedInputs(placement, self._count_uploads)
        self.launching_seconds = self.waiting_seconds = 0.0
        self.uploaded_arrays = self.uploaded_bytes = 0
        """Copied to the device by launches."""

    @property
    def state(self) -> State:
        """The device state. Every launch donates it and puts the new one in its place."""
        if self._state is None:
            self.programs.may_time = False
            self._state = self._new_state()
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state

    @property
    def table(self) -> ProgramTable:
        """The programs that launches choose from."""
        return self.programs.table

    @table.setter
    def table(self, table: ProgramTable) -> None:
        self.programs.use(table)

    def reset(self) -> None:
        """Empty caches and free rows, after a failure that may have left the donated state unusable."""
        self.inputs.forget()
        for array in jax.tree.leaves(self._state):  # two caches would not fit
            if not array.is_deleted():
                array.delete()
        self._state = self._new_state()

    def run_once(self) -> None:
        """Allocates the state and runs every compiled program once, on the row that pads batches.

        So a GPU loads the code and builds the graph of each program now and not while a client waits, and a faulty one shows.

        Raises:
            ValueError: the cache can't be allocated.
            ProgramError: the first program that fails.
        """
        try:
            jax.block_until_ready(self.state)
        except jax.errors.JaxRuntimeError as error:
            reason = next(iter(str(error).splitlines()), "")
            raise ValueError(
                f"the cache can't be allocated ({self.num_pages} pages; {reason:.200}): lower num_pages or mem_fraction"
            ) from error
        for program in list(self.programs.compilations):
            if isinstance(program, BatchProgram):
                self.inputs.compile_for((program.batch, program.pages))
            try:
                jax.block_until_ready(self.run(program, *self._idle(program)))
            except Exception as error:
                self._state = None  # it was donated to the program
                raise ProgramError.of(program, "failed on its first run", error) from error

    def _idle(self, program: Program) -> tuple[Any, ...]:
        """Inputs with which the program changes nothing but the row that pads batches."""
        return program.idle(self._padding_row, self.programs.inputs(program))

    def launch_admission(self, request: Request) -> None:
        """Sets up the request's row."""
        self.run(AdmitProgram(), admission(request, self._vocab_size, self._max_length, self.no_bias))
        request.is_masked = False

    def launch_mask(self, request: Request, mask: np.ndarray | None) -> None:
        """From now on programs emit one token each for the request, one that this mask [words] allows. None: ends the mask."""
        if mask is not None or request.is_masked:
            words = np.zeros(words_of(self._vocab_size), np.uint32) if mask is None else mask
            self.run(MaskProgram(), np.array([request.row], np.int32), words[None], np.array([mask is not None]))
            request.is_masked = mask is not None

    def launch_lend(self, request: Request, stretch: np.ndarray) -> None:
        """Lends the request's row a stretch of another text."""
        self.run(LendProgram(len(stretch)), np.array([request.row], np.int32), stretch[None])

    def program_to_wait_for(self, request: Request) -> Program | None:
        """A program that the request can't run without and that is being compiled, or can't be. Also asks for those halves of
        cycles that make a request under a grammar faster."""
        if request.matcher is not None:
            table = self.programs.table
            for tree in dict.fromkeys((*table.own, *(() if request.tree is None else (request.tree,)))):
                for program in table.under_masks(tree):
                    self.programs.require(program, LATER)
        missing = [program for program in self.needed_by(request) if not self.programs.can_launch(program)]
        for program in missing:
            self.programs.require(program)
        return next((program for program in missing if program in self.programs.failed), missing[0]) if missing else None

    def needed_by(self, request: Request) -> list[Program]:
        """The programs that no start compiles and the request can't run without: prefills with log probabilities, and the halves of
        cycles, without which a lossy engine's text under a grammar would differ."""
        table, needed = self.programs.table, list[Program]()
        if request.params.prompt_logprobs is not None:
            *_, largest = table.prefills(1, scores=True)  # serves a smaller launch, too
            needed.append(largest)
        if request.matcher is not None and not table.own_first:
            needed += table.under_masks(request.tree or table.own[0])
        return needed

    def prefill_groups(self, chunks: Sequence[PrefillChunk]) -> list[list[PrefillChunk]]:
        """The chunks of a step by launch, in the order of the launches: those of several prompts together, where their program is
        there and is faster than one by one."""
        groups = grouped(chunks, self.programs.table, self._page_size)
        return [part for group in groups for part in ([group] if self._is_faster_together(group) else [[each] for each in group])]

    def _is_faster_together(self, group: Sequence[PrefillChunk]) -> bool:
        if len(group) == 1:
            return True
        program = self.programs.table.prefill_together(group[0].size)
        # On a GPU reading the weights takes the time. On a CPU tokens do, and padding too where row kernels are missing: so less
        # than half of them may be padding. With these kernels it hardly matters: 2 to 8 prompts of 20 to 250 tokens took 0.8 to
        # 1.2 times as long as one by one (SmolLM2 and the built-in model; two cores of an AMD EPYC, 28 November 2026).
        if 2 * len(group) <= program.batch and self.placement.device.platform == "cpu":
            return False
        self.programs.ask_for(program)
        return self.programs.can_launch(program)

    def launch_prefill(self, chunks: Sequence[PrefillChunk]) -> Launched:
        """Starts one of the `prefill_groups`. The report has the first tokens of the sequences whose last chunks are in it."""
        scores = chunks[0].request.params.prompt_logprobs is not None
        if len(chunks) > 1:
            program = self.programs.table.prefill_together(chunks[0].size)
        else:
            program = self.programs.choose(self.programs.table.prefills(chunks[0].size, scores=scores))
        inputs = prefill_chunk(chunks, program, self._padding_row, self._page_size)
        requests = [chunk.request for chunk in chunks if chunk.is_last or scores]
        return Launched.of(self.run(program, inputs), requests, chunks=chunks)

    def launch_cycle(self, requests: list[Request], tree: TreeShape) -> Launched:
        """Starts one cycle of these requests. Those that have ended get no tokens."""
        program = self.programs.cycle(len(requests), tree)
        inputs = self._batch(program, requests, most_emitted=tree.num_steps + 1)
        return Launched.of(self.run(program, *inputs), requests, tree=tree)

    def launch_proposal(self, requests: list[Request], tree: TreeShape) -> Half:
        """Starts the first half of one cycle of these requests. The host, which may wait for the tree, then makes of the proposal
        what the second half verifies: the tree, or another one of the same size, under masks."""
        for request in requests:
            self.launch_mask(request, None)
        halves = list(self.programs.table.halves(len(requests), tree))
        propose, settle = next((both for both in halves if all(self.programs.can_launch(half) for half in both)), halves[0])
        for smaller in halves[0]:
            self.programs.ask_for(smaller)
        rows, page_table = self._batch(propose, requests, most_emitted=tree.num_steps + 1)
        proposal = self.run(propose, rows, page_table).proposal
        for array in jax.tree.leaves((proposal.tree.tokens, proposal.tree.parents, proposal.tree.sources, proposal.candidates)):
            array.copy_to_host_async()
        return Half(requests, proposal, settle, rows, page_table)

    def launch_settlement(self, half: Half, settlement: Settlement) -> Launched:
        """Starts the second half."""
        output = self.run(half.settle, half.rows, half.page_table, settlement)
        return Launched.of(output, half.requests, tree=half.settle.tree)

    def launch_catch_up(self, requests: list[Request]) -> None:
        """The drafter absorbs what it lags behind after plain cycles of these requests."""
        program = self.programs.choose(self.programs.table.catch_ups(len(requests)))
        self.run(program, *self._batch(program, requests, most_emitted=0))

    def time_cycle(self, batch: int, tree: TreeShape, repeats: int = 3) -> list[float]:
        """Seconds that a cycle of `batch` sequences takes, several times, measured on rows that are done."""
        program, seconds = self.programs.choose(self.programs.table.cycles(batch, tree)), []
        rows, page_table = self._idle(program)
        arguments = self.inputs.get(program, "rows", rows), self.inputs.get(program, "page table", page_table)
        for _ in range(repeats + 1):
            started = time.perf_counter()
            self.run(program, *arguments).report.block_until_ready()
            seconds.append(time.perf_counter() - started)
        return seconds[1:]

    def _batch(
        self, program: CycleProgram | CatchUpProgram | ProposeProgram, requests: list[Request], *, most_emitted: int
    ) -> tuple[Placed, Placed]:
        """State rows, and page tables of the slots that the launch may reach, padded to the program's size. `most_emitted`:
        the most tokens that it emits per request."""
        lengths = [len(each.tokens) + each.in_flight_tokens + most_emitted for each in requests]
        held = [each.held.pages[: -(-length // self._page_size)] for each, length in zip(requests, lengths, strict=True)]
        rows = np.full(program.batch, self._padding_row, np.int32)
        rows[: len(requests)] = [self._padding_row if request.row < 0 else request.row for request in requests]
        page_table = padded_table(held, program.batch, program.pages)
        if not self.programs.is_sealed:
            self.inputs.compile_for(page_table.shape)
        return self.inputs.get(program, "rows", rows), self.inputs.get(program, "page table", page_table)

    def _count_uploads(self, arguments: Any) -> None:
        for leaf in jax.tree.leaves(arguments):
            if isinstance(leaf, np.ndarray):
                self.uploaded_arrays += 1
                self.uploaded_bytes += leaf.nbytes

    def run(self, program: Program, *arguments: Any) -> Any:
        """Launches the program, here and in the other processes of the group, and keeps its state. Returns its output: the
        new State, or a NamedTuple with it as `state`."""
        started, inputs = time.perf_counter(), [each.array if isinstance(each, Placed) else each for each in arguments]
        if new := [each for each in arguments if not isinstance(each, Placed)]:
            self._count_uploads(new)
        compiled = self.programs[program]
        if self.group is not ALONE:
            self.group.launch(program, leaves_to_send(arguments))
        output = compiled(self.params, self._state or self.state, *inputs)
        self._state = output if isinstance(output, State) else output.state
        self.launching_seconds += time.perf_counter() - started
        return output

    def read(self, launched: Launched) -> list[Emitted]:
        """Waits for a launched program and returns what it emitted, per request."""
        started = time.perf_counter()
        read = launched.on_host()
        self.waiting_seconds += time.perf_counter() - started
        return emitted(read, self.merge.drafter.source_names)

    def read_prompt_logprobs(self, launched: Launched) -> list[TokenLogprob]:
        """Log probabilities of the prompt tokens after each token of the chunk: first_slot + 1 and on."""
        (chunk,) = launched.chunks
        count = chunk.request.params.prompt_logprobs
        assert count is not None
        following = chunk.request.prompt[chunk.first_slot + 1 : chunk.first_slot + chunk.size + 1]
        return token_logprobs(jax.tree.map(np.asarray, launched.prompt_logprobs), 0, following, count)
