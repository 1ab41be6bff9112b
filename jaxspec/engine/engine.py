"""The engine: requests in, tokens out. One thread only; `server/` wraps it for many clients."""

import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence

from jaxspec.config import EngineConfig, SpecConfig
from jaxspec.engine.detokenizer import Decoder
from jaxspec.engine.output import Output
from jaxspec.engine.pages import IntegrityError, PageAllocator, PrefixCache
from jaxspec.engine.request import Intake, Limits, Request, TokenLogprob, Update
from jaxspec.engine.runner import MAX_LAG, Launched, Runner
from jaxspec.engine.scheduler import PrefillChunk, Scheduler, StepPlan
from jaxspec.engine.stats import EngineStats, Stopwatch
from jaxspec.engine.trees import TreeChoice
from jaxspec.models.registry import LoadedHead, LoadedTarget
from jaxspec.sampling_params import SamplingParams
from jaxspec.spec.sampling import MAX_STOP_TOKENS

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests step by step. A step launches some prefill chunks and one cycle, and hands out what is new.

    Two loops do the same: `plain_step` reads what it launched; `overlapped_step` reads what the step before launched,
    so that the host works while the device does. They give the same tokens.
    """

    def __init__(
        self,
        target: LoadedTarget,
        head: LoadedHead | None,
        tokenizer: Decoder | None,
        spec: SpecConfig,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
    ):
        if spec.num_steps > 0 and head is None:
            raise ValueError(f"speculation with the tree {spec} needs a draft head: give one, or SpecConfig(num_steps=0)")
        if head is not None:
            vocabulary = head.config.draft_vocab_size or target.config.vocab_size
            widest = max(tree.topk for tree in (spec, *config.request_trees, *config.adaptive_trees))
            if widest > vocabulary:
                raise ValueError(f"topk={widest} is more than the {vocabulary} tokens that the head drafts among: lower topk")
        self.config, self.spec, self.tokenizer, self.clock = config, spec, tokenizer, clock
        self.vocab_size = target.config.vocab_size
        self.context_length: int = config.context_length or target.config.max_position_embeddings
        if head is None and (drafting := [str(tree) for tree in config.request_trees if tree.num_steps]):
            raise ValueError(f"request_trees holds {', '.join(drafting)}, but there is no draft head: leave it out")
        adaptive = config.adaptive and head is not None
        self.trees = TreeChoice(spec, adaptive, config.request_trees, candidates=config.adaptive_trees)
        self.runner = Runner(target, head, self.trees, config, self.context_length)
        self.pages = PageAllocator(self.runner.num_pages, config.page_size)
        self.prefix_cache = PrefixCache(self.pages, config.prefix_cache)
        self.scheduler = Scheduler(
            self.prefix_cache, config.max_running_requests, config.prefill_chunk, config.max_waiting_requests
        )
        self.output = Output(self.scheduler, clock)
        limits = Limits(self.vocab_size, self.context_length, MAX_STOP_TOKENS, self.runner.num_pages, config.page_size)
        self._intake = Intake(limits, target.config.eos_token_ids, tokenizer, config.random_seed)
        self._names = (f"request-{number}" for number in itertools.count())
        self._launched: list[Launched] = []
        """Programs whose results were not read yet, in order of their launch."""
        self._unseen: list[Request] = []
        """Whose chunks were launched since the last program that reports: if one failed, that one's result will tell."""
        self._is_launching = False
        self._suspects: list[Request] = []
        """Whose program is being launched or read: a failure now is theirs."""
        self._state_is_lost = False
        self._prompt_tokens = self._prefilled = self._preemptions = self._cycles = self._failed_steps = 0
        self._stepping = Stopwatch()

    # Requests

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        tree: SpecConfig | None = None,
        wants_trees: bool = False,
    ) -> Request:
        """Queues a request.

        Args:
            prompt: token ids.
            params: how to sample; n must be 1 (see SamplingParams.copies).
            request_id: its name in updates; None: one is made up.
            priority: larger is more urgent; among equals the first to come is the first to be served.
            timeout: seconds after which it ends with finish_reason "timeout", wherever it is.
            tree: of its cycles, one of `trees.all`; None: whatever the engine chooses.
            wants_trees: its updates show what was drafted (Verification.tree).

        Raises:
            ValueError: it can't be served; the message names the field.
            QueueFull: max_waiting_requests wait already.
        """
        if request_id is None:
            request_id = next(name for name in self._names if not self.scheduler.find(name))
        elif self.scheduler.find(request_id):
            raise ValueError(f"request_id {request_id!r} is in use by an unfinished request: choose another")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds, got {timeout!r}")
        if tree is not None and tree not in self.trees.all:
            raise ValueError(
                f"tree {tree} is not among those of this engine: {', '.join(map(str, self.trees.all))} (see request_trees)"
            )
        now = self.clock()
        request = self._intake.request(prompt, params, request_id, priority, math.inf if timeout is None else now + timeout)
        request.tree, request.wants_trees, request.added_at = tree, wants_trees, now
        self.scheduler.add(request)
        self._prompt_tokens += len(request.prompt)
        return request

    def abort(self, request_id: str) -> Update | None:
        """Ends a request now, wherever it is, with finish_reason "abort"; None if no unfinished request has this id."""
        request = self.scheduler.find(request_id)
        return self.output.end(request, "abort") if request else None

    def flush_cache(self) -> None:
        """Forgets every cached prefix. Running requests keep their pages; what they compute is cached no more."""
        self.prefix_cache.flush()

    @property
    def has_work(self) -> bool:
        """A step would do something: requests are unfinished, a launched program was not read, or an update not handed out."""
        return self.scheduler.has_work or bool(self._launched) or self.output.are_waiting

    def stats(self) -> EngineStats:
        """Totals since the start, and what is held now."""
        cache = self.prefix_cache.statistics
        return EngineStats(
            running=len(self.scheduler.admitted),
            waiting=len(self.scheduler.waiting),
            used_pages=cache.held_pages,
            cached_pages=cache.cached_pages,
            total_pages=self.pages.num_pages,
            page_size=self.pages.page_size,
            prefilled_tokens=self._prefilled,
            prefix_queried_tokens=cache.queried_tokens,
            prefix_hit_tokens=cache.hit_tokens,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self.output.generated_tokens,
            finished=dict(self.output.finished),
            verify_count=self.output.verify_count,
            verified_tokens=self.output.verified_tokens,
            draft_count=self.output.draft_count,
            draft_tokens=self.output.draft_tokens,
            accepted_tokens=sum(self.output.accepted_per_position),
            accepted_per_position=tuple(self.output.accepted_per_position),
            preemptions=self._preemptions,
            cycles=self._cycles,
            failed_steps=self._failed_steps,
            step_seconds=self._stepping.seconds,
            waiting_seconds=self.runner.waiting.seconds,
            launching_seconds=self.runner.launching.seconds,
        )

    def warm_up(self, *, progress: bool = False) -> float:
        """Compiles every program that serving can need; afterwards nothing compiles. Returns the seconds it took."""
        started = time.perf_counter()
        self.runner.programs.compile_all(self.runner.all_programs(), progress=progress)
        self.runner.programs.seal()
        self.trees.measure(self.runner)
        return time.perf_counter() - started

    # Steps

    def step(self) -> list[Update]:
        """Goes on by one step of the configured loop. A failure of the device, or of anything that works on a program's results,
        ends the requests of that program with finish_reason "error"; the others go on.

        Raises:
            IntegrityError: pages are missing or have two owners: nothing that the engine says can be trusted any more.
        """
        with self._stepping:
            self._safe_step()
        return self.output.hand_out()

    def _safe_step(self) -> None:
        try:
            if self._state_is_lost:
                self._recover()
            for request in self.scheduler.expired(self.clock()):
                self.output.time_out(request)
            if self.config.overlap:
                self.overlapped_step()
            else:
                self.plain_step()
            self._failed_steps = 0
        except IntegrityError:
            raise
        except Exception as error:
            self._failed_steps += 1
            self._state_is_lost = True
            if self._is_launching:
                self._suspects = self._first_failed() or [*self._unseen, *self._suspects]
            if not self._suspects:  # it is nobody's program: going on would fail again
                raise
            logger.exception("a step failed; the %d requests that it worked on end with an error", len(self._suspects))
            for request in self._suspects:
                self.output.fail(request, error)
        except BaseException:  # Ctrl-C may come in the middle of a launch
            self._state_is_lost = True
            raise
        finally:
            self._suspects, self._is_launching = [], False

    def plain_step(self) -> None:
        """Launches what is next and waits for it."""
        self._read(self._launch())

    def overlapped_step(self) -> None:
        """Launches what is next, then reads what the step before launched while the device works.

        The next launch needs no result of the one before: lengths, roots and whether a sequence is done live on the device,
        and each request has the pages for all that launched programs can emit.
        """
        before = self._launched
        self._launched = self._launch()
        self._read(before)

    def _launch(self) -> list[Launched]:
        self._is_launching = True
        plan = self.scheduler.plan(self.trees.most_emitted)
        self._preemptions += len(plan.preempted)
        launched = [*self._launch_cycles(plan), *self._launch_prefills(plan)]
        self._is_launching = False
        for step in launched:
            for request in step.requests if step.emits else ():
                request.in_flight += 1
                request.in_flight_tokens += step.most_emitted
        return launched

    def _launch_cycles(self, plan: StepPlan) -> list[Launched]:
        """One cycle, or several if requests ask for trees of their own."""
        catches_up, launched = False, []
        for spec, requests in self.trees.split(plan.cycle, self.runner.bucket).items():
            self._suspects = requests
            catches_up |= self._catch_up(requests, spec)
            launched.append(self._with_unseen(self.runner.launch_cycle(requests, spec)))
            self._suspects = []
        self._cycles += len(launched)
        self.trees.launched(cycles=len(launched), catch_up=catches_up, prefill=bool(plan.prefills))
        return launched

    def _catch_up(self, cycle: list[Request], spec: SpecConfig) -> bool:
        """Before a tree the head must have seen everything; plain cycles postpone that, as long as there is room to remember it."""
        behind = [request for request in cycle if request.postponed]
        needed = bool(behind) and (spec.num_steps > 0 or max(request.postponed for request in behind) == MAX_LAG)
        if needed:
            self.runner.launch_catch_up(behind)
            for request in behind:
                request.postponed = 0
        if spec.num_steps == 0 and self.runner.catches_up:
            for request in cycle:
                request.postponed += 1
        return needed

    def _launch_prefills(self, plan: StepPlan) -> list[Launched]:
        admitted, launched = set(plan.admitted), []
        for step in plan.prefills:
            self._suspects = [step.request]
            if step.request in admitted:
                step.request.postponed = 0
                if step.request.launched_at is None:
                    step.request.launched_at = self.clock()
                self.runner.launch_admission(step.request)
            prefill = self.runner.launch_prefill(step)
            self._suspects = []
            self._prefilled += step.size
            if prefill.emits or prefill.prompt_logprobs is not None:
                launched.append(self._with_unseen(prefill))
            else:
                self._unseen.append(step.request)
        return launched

    def _with_unseen(self, step: Launched) -> Launched:
        step, self._unseen = step._replace(unseen=self._unseen), []
        return step

    def _read(self, launched: list[Launched]) -> None:
        for step in launched:
            self._suspects = [*step.requests, *step.unseen]
            emitted = self.runner.read(step)
            if step.prefill is not None:
                self._take_prompt_logprobs(step.prefill, self.runner.read_prompt_logprobs(step))
            self._suspects = []
            if step.spec is not None:
                self.trees.was_read(step.spec, self.runner.bucket(len(step.requests)), [len(each.tokens) for each in emitted])
            if step.emits:
                for request, its in zip(step.requests, emitted, strict=True):
                    request.in_flight -= 1
                    request.in_flight_tokens -= step.most_emitted
                    self.output.take(request, its, step.spec)

    def _take_prompt_logprobs(self, prefill: PrefillChunk, entries: list[TokenLogprob]) -> None:
        for index, entry in enumerate(entries):
            prefill.request.prompt_logprobs[prefill.first_slot + 1 + index] = entry

    def _first_failed(self) -> list[Request]:
        """A launch failed, perhaps because of an earlier program: whose result can't be read?"""
        for step in self._launched:
            try:
                self.runner.read(step)
            except Exception:
                return [*step.requests, *step.unseen]
        return []

    def _recover(self) -> None:
        """Begins again after a failure: the state was donated to a program that may never have run, so all keys are gone.

        Requests that were running start over from the tokens that were read; with the same noise they get the same text.
        """
        self.runner.reset()
        self.scheduler.lose_device_state()
        self._launched, self._unseen = [], []
        self.trees.forget_launched()
        for request in self.scheduler.unfinished:
            request.in_flight = request.in_flight_tokens = 0
        self._state_is_lost = False
