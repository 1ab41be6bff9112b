"""The engine: requests in, tokens out. One thread only; `server/` wraps it for many clients."""

import itertools
import random
import time
from collections.abc import Sequence

from jaxspec.config import EngineConfig, SpecConfig
from jaxspec.engine.detokenizer import Decoder, Detokenizer
from jaxspec.engine.pages import PageAllocator
from jaxspec.engine.request import Request, Status, Update
from jaxspec.engine.runner import Emitted, Launched, Runner
from jaxspec.engine.scheduler import Scheduler
from jaxspec.engine.stats import EngineStats
from jaxspec.models.loaded import LoadedHead, LoadedTarget
from jaxspec.sampling_params import SamplingParams
from jaxspec.spec.state import MAX_STOP_TOKENS
from jaxspec.spec.verify import OUT_OF_BUDGET, STOPPED


class Engine:
    """Runs requests step by step. A step launches at most one prefill chunk and one cycle, and hands out what is new.

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
    ):
        if spec.num_steps > 0 and head is None:
            raise ValueError(f"speculation with the tree {spec} needs a draft head: give one, or SpecConfig(num_steps=0)")
        if head is not None and spec.topk > (vocabulary := head.config.draft_vocab_size or target.config.vocab_size):
            raise ValueError(f"topk={spec.topk} is more than the {vocabulary} tokens that the head drafts among: lower topk")
        self.config, self.spec, self.tokenizer = config, spec, tokenizer
        self.vocab_size, self.eos_token_ids = target.config.vocab_size, target.config.eos_token_ids
        self.context_length: int = config.context_length or target.config.max_position_embeddings
        self.runner = Runner(target, head, spec, config, self.context_length)
        self.pages = PageAllocator(self.runner.num_pages, config.page_size)
        self.scheduler = Scheduler(self.pages, config.max_running_requests, config.prefill_chunk)
        self.step = self.overlapped_step if config.overlap else self.plain_step
        self._launched: list[Launched] = []
        self._numbers = itertools.count()
        self._seeds = random.Random(config.random_seed)
        self._prefilled = self._generated = self._verifications = self._verified = 0

    # Requests

    def add(self, prompt: Sequence[int], params: SamplingParams, request_id: str | None = None) -> Request:
        """Queues a request. Raises ValueError, naming the field, for one that can't be served."""
        prompt = tuple(prompt)
        self._check(prompt, params)
        number = next(self._numbers)
        request_id = f"request-{number}" if request_id is None else request_id
        if self.scheduler.find(request_id):
            raise ValueError(f"request_id {request_id!r} is in use by an unfinished request: choose another")
        drawn = self._seeds.getrandbits(64)  # drawn for every request, so that one with a seed does not shift the others
        stop = tuple(dict.fromkeys((*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids))))
        if len(stop) > MAX_STOP_TOKENS:
            raise ValueError(
                f"stop_token_ids and the model's end-of-sequence tokens are {len(stop)}; at most {MAX_STOP_TOKENS} fit"
            )
        request = Request(
            id=request_id,
            prompt=prompt,
            params=params,
            seed=drawn if params.seed is None else params.seed % 2**64,
            stop_token_ids=stop,
            detokenizer=Detokenizer(self.tokenizer, params.stop, params.skip_special_tokens),
        )
        self.scheduler.add(request)
        return request

    def _check(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        if not prompt:
            raise ValueError("prompt is empty: at least one token is needed")
        if not all(0 <= token < self.vocab_size for token in (min(prompt), max(prompt))):
            raise ValueError(
                f"prompt holds token id {min(prompt) if min(prompt) < 0 else max(prompt)}; ids are 0 to {self.vocab_size - 1}"
            )
        if not all(token < self.vocab_size for token in params.stop_token_ids):
            raise ValueError(f"stop_token_ids holds {max(params.stop_token_ids)}; token ids are 0 to {self.vocab_size - 1}")
        needed = len(prompt) + params.max_tokens
        if needed > self.context_length:
            raise ValueError(
                f"prompt ({len(prompt)} tokens) and max_tokens ({params.max_tokens}) are {needed} tokens together, more than the "
                f"context length of {self.context_length}: shorten the prompt or lower max_tokens"
            )
        if self.pages.pages_for(needed) > self.pages.num_pages:
            raise ValueError(
                f"prompt and max_tokens are {needed} tokens together, more than the cache's {self.pages.num_pages} pages of "
                f"{self.pages.page_size} hold: lower max_tokens or raise num_pages"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model directory has none: use stop_token_ids")

    def abort(self, request_id: str) -> Update | None:
        """Ends a request now, wherever it is, with finish_reason "abort"; None if no unfinished request has this id."""
        request = self.scheduler.find(request_id)
        return self._finish(request, "abort", None, len(request.detokenizer.text), ()) if request else None

    @property
    def has_work(self) -> bool:
        """A step would do something: requests are unfinished, or a launched program was not read yet."""
        return self.scheduler.has_work or bool(self._launched)

    def stats(self) -> EngineStats:
        """Totals since the start, and what is held now."""
        return EngineStats(
            running=len(self.scheduler.admitted),
            waiting=len(self.scheduler.waiting),
            used_pages=self.pages.num_pages - self.pages.free,
            total_pages=self.pages.num_pages,
            page_size=self.pages.page_size,
            prefilled_tokens=self._prefilled,
            generated_tokens=self._generated,
            verify_count=self._verifications,
            verified_tokens=self._verified,
        )

    def warm_up(self, *, progress: bool = False) -> float:
        """Compiles every program that serving can need; afterwards nothing compiles. Returns the seconds it took."""
        started = time.perf_counter()
        self.runner.programs.compile_all(self.runner.all_programs(), progress=progress)
        self.runner.programs.seal()
        return time.perf_counter() - started

    # Steps

    def plain_step(self) -> list[Update]:
        """Launches what is next and waits for it."""
        return self._read(self._launch())

    def overlapped_step(self) -> list[Update]:
        """Launches what is next, then reads what the step before launched while the device works.

        The next launch needs no result of the one before: lengths, roots and whether a sequence is done live on the
        device, and pages were allocated for a request's whole life.
        """
        before, self._launched = self._launched, self._launch()
        return self._read(before)

    def _launch(self) -> list[Launched]:
        plan = self.scheduler.plan()
        launched = []
        if plan.cycle:
            launched.append(self.runner.launch_cycle(plan.cycle))
        if plan.prefill:
            self._prefilled += plan.prefill.size
            prefill = self.runner.launch_prefill(plan.prefill)
            if plan.prefill.is_last:
                launched.append(prefill)
        for request in itertools.chain.from_iterable(step.requests for step in launched):
            request.in_flight += 1
        return launched

    def _read(self, launched: list[Launched]) -> list[Update]:
        updates = []
        for step in launched:
            for request, emitted in zip(step.requests, self.runner.read(step), strict=True):
                request.in_flight -= 1
                if request.status is not Status.FINISHED:  # finished since: by a stop string or an abort
                    updates.append(self._take(request, emitted, step.is_cycle))
        return [update for update in updates if update.token_ids or update.output]

    def _take(self, request: Request, emitted: Emitted, is_cycle: bool) -> Update:
        """Adds what a program emitted to the request; finishes it at a stop or at its budget."""
        shown, new = len(request.detokenizer.text), []
        for token in emitted.tokens:
            new.append(token)
            is_stop_token = emitted.finish == STOPPED and len(new) == len(emitted.tokens)
            if not is_stop_token and request.detokenizer.add(token):
                break
        request.output += new
        self._generated += len(new)
        if is_cycle and new:
            request.accept_lengths.append(len(new))
            request.accepted_drafts += min(emitted.accepted, len(new))
            self._verifications += 1
            self._verified += len(new)
        if request.detokenizer.matched is not None:
            return self._finish(request, "stop", request.detokenizer.matched, shown, new)
        if emitted.finish == STOPPED:
            return self._finish(request, "stop", new[-1], shown, new)
        if emitted.finish == OUT_OF_BUDGET:
            return self._finish(request, "length", None, shown, new)
        return Update(request.id, request.detokenizer.text[shown:], tuple(new))

    def _finish(self, request: Request, reason: str, matched: int | str | None, shown: int, new: Sequence[int]) -> Update:
        """Ends a request; `shown` characters of its text were handed out before."""
        request.detokenizer.finish()
        if request.detokenizer.matched is not None and reason != "abort":
            reason, matched = "stop", request.detokenizer.matched
        request.finish_reason, request.matched_stop = reason, matched
        self.scheduler.finish(request)
        return Update(request.id, request.detokenizer.text[shown:], tuple(new), request.result())
