"""The device side of the engine: weights, state, and launching programs on them."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import EngineConfig, SpecConfig
from jaxspec.engine.device_state import (
    admission,
    cache_bytes_per_token,
    check_kernel,
    cycle_options,
    default_pages,
    merger,
    new_state,
    state_sizes,
)
from jaxspec.engine.output import Emitted
from jaxspec.engine.program_table import AdmitProgram, CatchUpProgram, CycleProgram, Program, ProgramTable
from jaxspec.engine.programs import Programs
from jaxspec.engine.request import DraftedTree, Request, TokenLogprob
from jaxspec.engine.scheduler import PrefillChunk
from jaxspec.engine.stats import Stopwatch
from jaxspec.engine.trees import MAX_LAG, TreeChoice
from jaxspec.models.registry import LoadedHead, LoadedTarget
from jaxspec.spec.prefill import Chunk
from jaxspec.spec.sampling import Logprobs
from jaxspec.spec.state import Drafted, State, StepOutput
from jaxspec.spec.verify import OUT_OF_BUDGET, REPORT_HEADER, RUNNING, STOPPED

FINISH = {RUNNING: None, STOPPED: "stop", OUT_OF_BUDGET: "length"}


class Launched(NamedTuple):
    """A launched program. Row i of its report belongs to requests[i]."""

    requests: list[Request]
    report: jax.Array
    spec: SpecConfig | None
    """The tree of a cycle; None for a prefill chunk."""
    prefill: PrefillChunk | None
    logprobs: Logprobs | None
    """Only if one of the requests wants them, as the next."""
    prompt_logprobs: Logprobs | None
    drafted: Drafted | None
    unreported: list[Request]
    """Requests with chunks that were launched before it and have no result: if one of these failed, this result shows it."""

    @property
    def emits(self) -> bool:
        """False for a chunk that is not its prompt's last."""
        return self.prefill is None or self.prefill.is_last

    @property
    def reports(self) -> bool:
        """Whether there is a result to read."""
        return self.emits or self.prompt_logprobs is not None

    @property
    def most_emitted(self) -> int:
        """Tokens per request, at most."""
        return 1 if self.spec is None else self.spec.num_steps + 1


class Runner:
    """Owns everything on the device. The state that a launch donates is replaced by its result at once."""

    def __init__(self, target: LoadedTarget, head: LoadedHead | None, trees: TreeChoice, config: EngineConfig, context_length: int):
        check_kernel(config.attention_kernel, jax.devices()[0])
        self.params = {"target": target.params, "head": head.params if head else {}}
        dtype = target.params["embed_tokens"].dtype
        pages_per_sequence = -(-context_length // config.page_size)
        models = [target.config, *([head.config.layer] if head else [])]
        page_bytes = config.page_size * sum(cache_bytes_per_token(model, dtype) for model in models)
        self.table = ProgramTable.of(
            config,
            pages_per_sequence,
            trees.own,
            trees.all,
            catches_up=trees.head_lags,
            narrow_tables=jax.default_backend() != "gpu",
        )
        self.num_pages = config.num_pages or default_pages(config, pages_per_sequence, page_bytes, self.params)
        head_config, max_lag = head.config if head else None, MAX_LAG if trees.head_lags else 1
        self._sizes = state_sizes(target.config, head_config, max_length=context_length, max_lag=max_lag)
        # One more row than requests. It is always done, and pads batches.
        self._padding_row, self._page_size = config.max_running_requests, config.page_size
        self._no_bias = jnp.zeros((1, target.config.vocab_size), jnp.float32)
        self._new_state = partial(
            new_state, target.config, head_config, self._sizes,
            rows=self._padding_row + 1, num_pages=self.num_pages, page_size=config.page_size, dtype=dtype,
        )  # fmt: skip
        self.state = self._new_state()
        self.programs = Programs(merger(target, head, config.attention_kernel), self.params, self.state, cycle_options(config))
        self.launching, self.waiting = Stopwatch(), Stopwatch()

    def reset(self) -> None:
        """Empty caches and free rows, after a failure that may have left the donated state unusable."""
        for array in jax.tree.leaves(self.state):  # two caches would not fit
            if not array.is_deleted():
                array.delete()
        self.state = self._new_state()

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes at which each tree that the engine chooses from has a program."""
        width = self.table.pages[-1]
        ready = (
            batch
            for batch in self.table.batches
            if all(self.programs.can_launch(CycleProgram(batch, width, tree)) for tree in self.table.own)
        )
        return tuple(ready) or self.table.batches[-1:]

    @property
    def ready_trees(self) -> tuple[SpecConfig, ...]:
        """The trees whose programs are there."""
        return tuple(tree for tree in self.table.trees if all(map(self.programs.can_launch, self.table.largest(tree))))

    def launch_admission(self, request: Request) -> None:
        """Sets up the request's row."""
        bias = self._no_bias if not request.params.biases else None
        self._run(AdmitProgram(), admission(request, self._sizes, bias))

    def launch_prefill(self, step: PrefillChunk) -> Launched:
        """Starts a chunk; its report holds the first token if the chunk is the sequence's last."""
        request, pages = step.request, step.pages[: self._pages_for(step.first_slot + step.size + 1)]
        program = self.programs.choose(self.table.prefills(step.size, len(pages)))
        tokens = np.zeros((1, program.chunk), np.int32)
        tokens[0, : step.size] = request.tokens[step.first_slot : step.first_slot + step.size]
        one = np.full(1, 1, np.int32)
        fields: dict[str, Any] = {
            "row": one * request.row,
            "page_table": padded_table([pages], 1, program.pages),
            "tokens": tokens,
            "first_slot": one * step.first_slot,
            "size": one * step.size,
            "cached": one * step.cached,
            "is_last": np.array([step.is_last]),
        }
        return launched(self._run(program, Chunk(**fields)), [request], prefill=step)

    def launch_cycle(self, requests: list[Request], spec: SpecConfig) -> Launched:
        """Starts one cycle of these requests."""
        if len(self.table.own) > 1:  # trees are compared at one batch size, so each needs a program of that size
            for tree in self.table.own:
                self.programs.ask_for(next(self.table.cycles(len(requests), self.table.pages[-1], tree)))
        rows, page_table = self.batch_of(requests, spec)
        batch, pages = page_table.shape
        return launched(self._run(CycleProgram(batch, pages, spec), rows, page_table), requests, spec=spec)

    def batch_of(self, requests: list[Request], spec: SpecConfig) -> tuple[np.ndarray, np.ndarray]:
        """The inputs of a cycle beside weights and state: state rows [batch] and page tables [batch, pages] of these requests."""
        lengths = [len(each.tokens) + each.in_flight_tokens + spec.num_steps + 1 for each in requests]
        return self._batch(requests, lengths, lambda pages: self.table.cycles(len(requests), pages, spec))

    def launch_catch_up(self, requests: list[Request]) -> None:
        """Extends the head by the slots that it lags behind after plain cycles of these requests."""
        lengths = [len(each.tokens) + each.in_flight_tokens for each in requests]
        rows, page_table = self._batch(requests, lengths, lambda _: self.table.catch_ups(len(requests)))
        self._run(CatchUpProgram(*page_table.shape), rows, page_table)

    def time_cycle(self, batch: int, spec: SpecConfig, repeats: int = 3) -> list[float]:
        """Seconds that a cycle of `batch` sequences takes, several times, measured on rows that are done."""
        program, seconds = self.programs.choose(self.table.cycles(batch, 1, spec)), []
        rows = np.full(program.batch, self._padding_row, np.int32)
        page_table = np.zeros((program.batch, program.pages), np.int32)
        for _ in range(repeats + 1):
            started = time.perf_counter()
            self._run(program, rows, page_table).report.block_until_ready()
            seconds.append(time.perf_counter() - started)
        return seconds[1:]

    def _batch[Kind: (CycleProgram, CatchUpProgram)](
        self, requests: list[Request], lengths: list[int], fitting: Callable[[int], Iterable[Kind]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """State rows and page tables for the slots that the launch may reach (`lengths`), padded to the size of a program.

        `fitting`: the programs for page tables with this many entries.
        """
        held = [request.held.pages[: self._pages_for(length)] for request, length in zip(requests, lengths, strict=True)]
        program = self.programs.choose(fitting(max(map(len, held))))
        rows = np.full(program.batch, self._padding_row, np.int32)
        rows[: len(requests)] = [request.row for request in requests]
        return rows, padded_table(held, program.batch, program.pages)

    def _pages_for(self, slots: int) -> int:
        return -(-slots // self._page_size)

    def _run(self, program: Program, *arguments: Any) -> Any:
        """Launches the program and keeps its state. Returns its output: a StepOutput or, without a report, the state."""
        with self.launching:
            output = self.programs[program](self.params, self.state, *arguments)
            self.state = output if isinstance(output, State) else output.state
        return output

    def read(self, launched: Launched) -> list[Emitted]:
        """Waits for a launched program and returns what it emitted, per request."""
        with self.waiting:
            report = np.asarray(launched.report)
            logprobs, drafted = jax.tree.map(np.asarray, (launched.logprobs, launched.drafted))
        emitted = []
        for row, (request, line) in enumerate(zip(launched.requests, report.tolist(), strict=False)):  # padding comes last
            tokens = line[REPORT_HEADER : REPORT_HEADER + line[0]]
            count = request.params.logprobs
            entries = [] if logprobs is None or count is None else token_logprobs(logprobs, row, tokens, count)
            tree = drafted_tree(drafted, row, line[1]) if drafted is not None and request.wants_trees else None
            emitted.append(Emitted(tokens, line[1], FINISH[line[2]], entries, tree))
        return emitted

    def read_prompt_logprobs(self, launched: Launched) -> list[TokenLogprob]:
        """Log probabilities of the prompt tokens after each token of the chunk: first_slot + 1 and on."""
        chunk, count = launched.prefill, launched.requests[0].params.prompt_logprobs
        if chunk is None or count is None:
            return []
        following = chunk.request.prompt[chunk.first_slot + 1 : chunk.first_slot + chunk.size + 1]
        return token_logprobs(jax.tree.map(np.asarray, launched.prompt_logprobs), 0, following, count)


def launched(
    output: StepOutput,
    requests: list[Request],
    *,
    spec: SpecConfig | None = None,
    prefill: PrefillChunk | None = None,
) -> Launched:
    """Starts copying to the host the parts of the output that the requests ask for."""
    logprobs = output.logprobs if any(request.params.logprobs is not None for request in requests) else None
    prompt_logprobs = output.prompt_logprobs if any(request.params.prompt_logprobs is not None for request in requests) else None
    drafted = output.drafted if any(request.wants_trees for request in requests) else None
    for array in (output.report, *(logprobs or ()), *(prompt_logprobs or ()), *(drafted or ())):
        array.copy_to_host_async()
    return Launched(requests, output.report, spec, prefill, logprobs, prompt_logprobs, drafted, unreported=[])


def padded_table(tables: Sequence[Sequence[int]], batch: int, width: int) -> np.ndarray:
    """[batch, width] int32; unused entries are page 0.

    In:  [[5, 6], [7]], 3, 4
    Out: [[5, 6, 0, 0], [7, 0, 0, 0], [0, 0, 0, 0]]
    """
    padded = np.zeros((batch, width), np.int32)
    for row, pages in zip(padded, tables, strict=False):
        row[: len(pages)] = pages
    return padded


def drafted_tree(drafted: Drafted, row: int, accepted: int) -> DraftedTree | None:
    """One row of arrays; None for plain decoding's lone root."""
    if drafted.tokens.shape[1] == 1:
        return None
    path = drafted.path[row, : accepted + 1]
    return DraftedTree(tuple(drafted.tokens[row].tolist()), tuple(drafted.parents[row].tolist()), tuple(path.tolist()))


def token_logprobs(logprobs: Logprobs, row: int, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """One entry per token, from one row of arrays, each with the `count` likeliest tokens."""
    entries = []
    for index, token in enumerate(tokens):
        ids, values = logprobs.top_ids[row, index, :count].tolist(), logprobs.top[row, index, :count].tolist()
        entries.append(TokenLogprob(token, float(logprobs.chosen[row, index]), tuple(zip(ids, values, strict=True))))
    return entries
