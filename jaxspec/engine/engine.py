"""The engine: requests in, tokens out. One thread only: `EngineThread` is one that serves all others."""

import itertools
import math
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from jaxspec.config import EngineConfig
from jaxspec.decoding.drafter import Drafter
from jaxspec.decoding.settings import MAX_STOP_TOKENS
from jaxspec.engine.launched import Launched
from jaxspec.engine.masking import Masking
from jaxspec.engine.models import drafter_of
from jaxspec.engine.output import Output
from jaxspec.engine.pages import PageAllocator, PrefixCache
from jaxspec.engine.recovery import ProgramFailed, Recovery
from jaxspec.engine.request import GenerationRequest, Limits, Request, Status, Update
from jaxspec.engine.runner import DEFAULT_START, Half, Runner, Start
from jaxspec.engine.scheduler import Scheduler, StepPlan
from jaxspec.engine.stats import EngineStats
from jaxspec.engine.text_store import Lending, TextStore
from jaxspec.engine.trees import Masks, PlannedCycle, TreeChoice
from jaxspec.grammar.cache import Grammars
from jaxspec.models.registry import LoadedHead, LoadedTarget
from jaxspec.text.detokenizer import Decoder
from jaxspec.tree_shape import TreeShape

MOMENT = 0.02
"""Seconds that a step without work waits for a program, at most; new requests wait as long."""


class Engine:
    """Runs requests step by step. A step launches a cycle for each tree in use, then prefill chunks, and returns updates.

    There are two loops, which produce the same tokens: `serial_step` reads what it launched; `overlapped_step` reads what the
    previous step launched, so that host and device work at the same time.
    """

    def __init__(
        self,
        target: LoadedTarget,
        drafter: LoadedHead | Drafter | None,
        tokenizer: Decoder | None,
        tree: TreeShape,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        start: Start = DEFAULT_START,
    ):
        """`drafter`: where drafts come from: a head, any other source, or None for plain decoding. `clock`: seconds, for timeouts
        and Timing.

        On a GPU, unless num_pages is given, this compiles the largest programs, as their memory decides the number of pages.

        Raises:
            ValueError: the head can't draft the trees, or the memory is too small.
            ProgramError: a program can't be compiled.
        """
        drafter = drafter_of(drafter, config)
        check_trees(tree, config, drafter)
        if config.random_seed is None:
            config = replace(config, random_seed=secrets.randbits(32))
        self.config, self.tree, self.tokenizer, self.clock = config, tree, tokenizer, clock
        self.vocab_size = target.config.vocab_size
        self.context_length: int = config.context_length or target.config.max_position_embeddings
        self.trees = TreeChoice(config, tree, drafter.traits)
        self.runner = Runner(target, drafter, self.trees, config, self.context_length, start)
        self.pages = PageAllocator(self.runner.num_pages, config.page_size)
        self.prefix_cache = PrefixCache(self.pages, config.prefix_cache)
        drafted, accepted = (Counter(dict.fromkeys(drafter.source_names, 0)) for _ in range(2))
        self.counts = EngineStats(
            total_pages=self.pages.num_pages, page_size=self.pages.page_size,
            accepted_per_position=[0] * (self.trees.most_emitted - 1), drafted_by_source=drafted, accepted_by_source=accepted,
        )  # fmt: skip
        """Counters; `stats` copies them and adds the current load."""
        self.grammars = Grammars(tokenizer, self.vocab_size, target.config.eos_token_ids)
        """The grammars that requests have used. Any thread may use this."""
        self.masking = Masking(self.grammars, self.runner, self.counts)
        self.scheduler = Scheduler(
            self.prefix_cache, config.max_running_requests, config.prefill_chunk, config.max_waiting_requests, self.counts
        )
        self.output = Output(self.scheduler, self.counts, clock)
        self.recovery = Recovery(self.runner, self.scheduler, self.trees, self.output, self.counts)
        self._limits = Limits(
            vocab_size=self.vocab_size, context_length=self.context_length, max_stop_tokens=MAX_STOP_TOKENS,
            eos_token_ids=target.config.eos_token_ids, has_tokenizer=tokenizer is not None, trees=self.trees.all,
        )  # fmt: skip
        self.lending = Lending(TextStore(config.ngram_share << 20)) if config.ngram_share else None
        self._added = 0
        """Requests so far: the number of the next one, from which its seed follows."""
        self._names = (f"request-{number}" for number in itertools.count())
        self._launched: list[Launched] = []
        """Programs whose results were not read yet, in order of their launch."""

    # Requests

    def add(self, asked: GenerationRequest, request_id: str | None = None, *, came: float | None = None) -> Request:
        """Queues a request. `request_id` is its name in updates; None: the engine chooses one. `came`: when, by `clock`; None: now.

        Raises:
            ValueError: it can't be served; the message names the field.
            QueueFull: max_waiting_requests are waiting already.
        """
        if request_id is None:
            request_id = next(name for name in self._names if not self.scheduler.find(name))
        elif self.scheduler.find(request_id):
            raise ValueError(f"request_id {request_id!r} is in use by an unfinished request: choose another")
        tree = self._limits.tree(asked)
        self._limits.check(asked)
        params, came = asked.params, self.clock() if came is None else came
        stop_token_ids = self._limits.stop_token_ids(params)
        matcher = self.masking.matcher_of(params, stop_token_ids)
        request = Request(
            id=request_id,
            asked=asked,
            seed=self._own_seed(self._added) if params.seed is None else params.seed % 2**64,
            stop_token_ids=stop_token_ids,
            detokenizer=asked.detokenizer(self.tokenizer),
            arrival=self._added,
            deadline=math.inf if asked.timeout is None else came + asked.timeout,
            tree=tree,
            matcher=matcher,
            added_at=came,
        )
        self.scheduler.add(request, hold_back=self.runner.program_to_wait_for(request) is not None)
        self._added += 1
        self.counts.constrained_requests += matcher is not None
        self.counts.prompt_tokens += len(asked.prompt)
        return request

    def withdraw(self, request_id: str) -> None:
        """Takes back the last request, added since the last step, as if it had never been: another of the same call is refused."""
        request = self.scheduler.find(request_id)
        assert request is not None, request_id
        self.scheduler.finish(request)
        self._added -= 1
        self.counts.constrained_requests -= request.matcher is not None
        self.counts.prompt_tokens -= len(request.prompt)

    def _own_seed(self, number: int) -> int:
        """The seed of the request with this number, if it has none of its own."""
        return random.Random(f"{self.config.random_seed} {number}").getrandbits(64)

    def abort(self, request_id: str) -> Update | None:
        """Ends a waiting or running request with finish_reason "abort"; None if no unfinished request has this id."""
        request = self.scheduler.find(request_id)
        return self.output.end(request, "abort") if request else None

    def flush_cache(self) -> None:
        """Empties the prefix cache, and forgets texts kept for others. Running requests keep what they have but don't share
        it with new requests."""
        self.prefix_cache.flush()
        if self.lending is not None:
            self.lending.clear(self.scheduler.unfinished)

    @property
    def has_work(self) -> bool:
        """Whether there are unfinished requests, or programs or updates that were not read yet."""
        return bool(self._launched) or self.scheduler.has_work or self.output.has_updates

    def stats(self) -> EngineStats:
        """Totals since the start, and the current load."""
        return self.counts.snapshot(
            running=len(self.scheduler.admitted),
            waiting=len(self.scheduler.waiting) + len(self.scheduler.held_back),
            used_pages=self.prefix_cache.held_pages,
            cached_pages=self.prefix_cache.cached_pages,
            waiting_seconds=self.runner.waiting_seconds,
            launching_seconds=self.runner.launching_seconds,
            uploaded_arrays=self.runner.uploaded_arrays,
            uploaded_bytes=self.runner.uploaded_bytes,
            adaptive=self.trees.describe() if len(self.trees.own) > 1 else None,
        )

    def warm_up(self, *, progress: bool = False, wait_for_all: bool = True, check: Callable[[], None] = lambda: None) -> float:
        """Compiles every program that serving can need, so that no launch compiles, and runs each once. Returns the seconds it
        took. `check` is called every second; an exception from it ends the compiling.

        wait_for_all=False: compiles only as many as can serve every request. The others compile in the background, smaller sizes
        when a launch asks for them, and are used from the next cycle on. They get no trial run, which would have to wait for the
        state that requests are using; if one fails, `step` recovers as always.

        Raises:
            ProgramError: a program can't be compiled or fails on its first run.
            ValueError: the cache can't be allocated.
        """
        started, programs, table = time.perf_counter(), self.runner.programs, self.runner.table
        waited_for = [program for request in self.scheduler.unfinished for program in self.runner.needed_by(request)]
        programs.compile_all([*(table.all() if wait_for_all else table.first()), *waited_for], progress=progress, check=check)
        programs.seal()
        try:
            self.runner.run_once()
            self.trees.measure(self.runner.time_cycle, programs.ready.batches, programs.ready.trees)
        except BaseException:
            self.recovery.is_due = True  # the state was donated to what failed
            raise
        if not wait_for_all:
            programs.ask_for_more()
        return time.perf_counter() - started

    # Steps

    def step(self) -> list[Update]:
        """Runs one step of the configured loop. If a program fails, its requests end with finish_reason "error" and the others
        continue.

        Raises:
            IntegrityError: pages are lost or have two owners, so no result can be trusted.
            Exception: whatever failed while no request's program ran, such as a bug in planning.
        """
        started = time.perf_counter()
        try:
            if self.recovery.is_due:
                self.recovery.restart(self._launched)
            for request in self.scheduler.expired(self.clock()) if self.scheduler.deadlines else ():
                self.output.time_out(request)
            if self.scheduler.held_back:
                self._end_waits()
            if self.config.overlap:
                self.overlapped_step()
            else:
                self.serial_step()
        except BaseException as error:
            self.recovery.after(error)
        finally:
            self.counts.step_seconds += time.perf_counter() - started
        return self.output.take_updates()

    def _end_waits(self) -> None:
        """Requests that were held back join the line when their program is there, and end if it can't be compiled. While there is
        nothing else to do, this waits a moment."""
        idle = not self._launched and len(self.scheduler.held_back) == len(self.scheduler.unfinished)
        if idle and not self.output.has_updates:
            self.runner.programs.wait_for_news(MOMENT)
        for request in self.scheduler.held_back[:]:
            program = self.runner.program_to_wait_for(request)
            if program is None:
                self.scheduler.join_line(request)
            elif (error := self.runner.programs.failed.get(program)) is not None:
                self.output.fail(request, error)

    def serial_step(self) -> None:
        """Plans, launches, and waits for the results of the same step."""
        plan = self.scheduler.plan(self.trees.most_emitted)
        launched, to_mask = self._launch(plan)
        self._read([*launched, *self._launch_masked(to_mask, launched)])

    def overlapped_step(self) -> None:
        """Plans, launches, and reads the results of the previous step while the device works.

        A launch needs no result of the previous one: lengths, roots and done flags are on the device, and each request has the
        pages for all tokens that launched programs can emit. Only masks of grammars need the results: so cycles under grammars, or
        their second halves, are launched last, when the device may still have the other cycles of this step to do.
        """
        plan = self.scheduler.plan(self.trees.most_emitted)
        before, (self._launched, to_mask) = self._launched, self._launch(plan)
        self._read(before)
        if to_mask:
            self._launched += self._launch_masked(to_mask, self._launched)

    def _launch(self, plan: StepPlan) -> tuple[list[Launched], list[Half | PlannedCycle]]:
        """Launches cycles, then prefills. Returns the programs that have a result to read, and the cycles under grammars, of which
        at most the first halves were launched, before all others."""
        launched: list[Launched] = []
        to_mask: list[Half | PlannedCycle] = []
        for cycle in self.trees.plan(plan.cycle, *self.runner.programs.ready, prefills=bool(plan.prefills)):
            try:
                if cycle.behind:
                    self.runner.launch_catch_up(cycle.behind)
                if cycle.masks is not Masks.NONE:
                    is_whole = cycle.masks is Masks.OF_ROOTS
                    to_mask.append(cycle if is_whole else self.runner.launch_proposal(cycle.requests, cycle.tree))
                    continue
                program = self.runner.launch_cycle(cycle.requests, cycle.tree)
            except Exception as error:
                raise self.recovery.failed_launch(cycle.requests, [*self._launched, *launched]) from error
            launched.append(self.recovery.with_unreported(program) if self.recovery.unreported else program)
            self.counts.cycles += 1
        if plan.prefills:
            self._launch_prefills(plan, launched)
        mark_in_flight(launched)
        return launched, to_mask

    def _launch_prefills(self, plan: StepPlan, launched: list[Launched]) -> None:
        """Launches the step's prefills. Adds those that have a result to read to what was `launched` in this step."""
        for chunks in self.runner.prefill_groups(plan.prefills):
            requests = [chunk.request for chunk in chunks]
            for request in requests:
                if request in plan.newly_admitted:
                    try:
                        self.runner.launch_admission(request)
                        if self.lending is not None:
                            self.runner.launch_lend(request, self.lending.begin(request))
                    except Exception as error:
                        raise self.recovery.failed_launch([request], [*self._launched, *launched]) from error
            try:
                self.masking.launch_masks(chunk.request for chunk in chunks if chunk.is_last)
                program = self.runner.launch_prefill(chunks)
            except Exception as error:
                raise self.recovery.failed_launch(requests, [*self._launched, *launched]) from error
            self.recovery.unreported += [request for request in requests if request not in program.requests]
            if program.reports:
                launched.append(self.recovery.with_unreported(program))
            for chunk in chunks:
                if chunk.request.launched_at is None:
                    chunk.request.launched_at = self.clock()
                self.counts.prefilled_tokens += chunk.size

    def _launch_masked(self, to_mask: list[Half | PlannedCycle], before: list[Launched]) -> list[Launched]:
        """Launches what is left of cycles under grammars. `before`: what was launched and not read."""
        launched: list[Launched] = []
        for cycle in to_mask:
            try:
                program = self.masking.launch(cycle, self.output.fail)
            except Exception as error:
                raise self.recovery.failed_launch(cycle.requests, [*before, *launched]) from error
            launched.append(self.recovery.with_unreported(program) if self.recovery.unreported else program)
            self.counts.cycles += 1
        mark_in_flight(launched)
        return launched

    def _read(self, launched: list[Launched]) -> None:
        """Waits for the results and adds them to their requests."""
        for program in launched:
            try:
                emitted = self.runner.read(program)
                if program.prompt_logprobs is not None:
                    self.output.add_prompt_logprobs(program.chunks[0], self.runner.read_prompt_logprobs(program))
            except Exception as error:
                raise ProgramFailed([*program.requests, *program.unreported]) from error
            if program.most_emitted:
                for request, new in zip(program.requests, emitted, strict=True):
                    request.in_flight -= 1
                    request.in_flight_tokens -= program.most_emitted
                    had_ended = request.status is Status.FINISHED
                    self.output.add(request, new, program.tree, drafts_count=program.drafts_count)
                    if self.lending is not None and not had_ended:
                        self._lend(self.lending, request)
            if program.tree is not None:
                self.trees.was_read([len(each.tokens) for each in emitted], drafts_count=program.drafts_count)
            self.counts.failed_steps = 0  # a launch alone proves nothing

    def _lend(self, lending: Lending, request: Request) -> None:
        """Gives a request whose text has grown another stretch if it needs one, and keeps that of one that has ended for others."""
        if request.status is Status.FINISHED:
            lending.end(request)
        elif request.status is Status.RUNNING and (stretch := lending.follow(request)) is not None:
            try:
                self.runner.launch_lend(request, stretch)
            except Exception as error:
                raise ProgramFailed([request]) from error
            self.counts.lent_texts += 1


def mark_in_flight(launched: list[Launched]) -> None:
    """Counts the programs that emit tokens of their requests."""
    for program in launched:
        for request in program.requests if program.most_emitted else ():
            request.in_flight += 1
            request.in_flight_tokens += program.most_emitted


def check_trees(tree: TreeShape, config: EngineConfig, drafter: Drafter) -> None:
    """Raises ValueError if the trees need a drafter and there is none, or need a wider one."""
    traits = drafter.traits
    if not traits.max_topk:
        if tree.num_steps > 0:
            raise ValueError(
                f"speculation with the tree {tree} needs a draft head: give one, ngram=True, or TreeShape(num_steps=0)"
            )
        if drafting := [str(tree) for tree in config.request_trees if tree.num_steps]:
            raise ValueError(
                f"request_trees holds {', '.join(drafting)}, but there is no draft head: leave it out, or set ngram=True"
            )
        return
    trees = (tree, *config.request_trees, *config.adaptive_trees)
    if not traits.limits_head and (limited := [str(tree) for tree in trees if tree.head_steps is not None]):
        raise ValueError(
            f"the fourth number of {', '.join(limited)} (head_steps) limits a head beside n-gram drafts, and this engine has not "
            "both: leave it out, or give a draft head and ngram=True"
        )
    if (widest := max(tree.topk for tree in trees)) > traits.max_topk:
        raise ValueError(f"topk={widest} is more than the {traits.max_topk} tokens that can be drafted behind another: lower topk")
    of_heads, deepest = max(tree.head_steps or 0 for tree in trees), max(tree.num_steps for tree in trees)
    if traits.max_head_steps is not None and of_heads > traits.max_head_steps:
        raise ValueError(f"head_steps={of_heads} is more than the {traits.max_head_steps} tokens that a block drafts: lower it")
    if traits.max_steps is not None and deepest > traits.max_steps:
        raise ValueError(f"num_steps={deepest} is more than the {traits.max_steps} tokens that a block drafts: lower num_steps")
