"""An engine without a model and a tokenizer of bytes: what the server's tests talk to."""

import itertools
import math
import threading
import time
from collections import Counter
from dataclasses import replace
from time import perf_counter
from types import SimpleNamespace

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxspec.engine.request import GenerationRequest, Request, Status, TokenLogprob, Update
from jaxspec.engine.scheduler import QueueFull
from jaxspec.engine.speculation import CycleCounts, DraftedTree, Verification
from jaxspec.engine.stats import AdaptiveState, EngineStats
from jaxspec.grammar.cache import Grammars
from jaxspec.grammar.trees import Pruning
from jaxspec.sampling_params import SamplingParams
from jaxspec.tree_shape import TreeShape

VOCABULARY = 256
CONTEXT = 64
TREE = TreeShape(3, 2, 5)
TEXT = "The quick brown föx jumps over the lazy dög. "
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}"
)
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}:"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments|tojson }}{% endfor %}|{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if closed %}<think></think>{% endif %}{% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE, size: int = 256) -> PreTrainedTokenizerFast:
    """Token i is the byte i; bytes from `size` on have none."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))  # GPT-2's alphabet: a byte that has no printable character gets one from above 255
    alphabet = {byte: chr(byte if byte in printable else next(others)) for byte in range(size)}
    tokenizer = Tokenizer(models.BPE(vocab={character: byte for byte, character in alphabet.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template)


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Decodes as Llama 2's: without a text's first space; bytes are text from a character's first one on. 1 + i is byte i."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "the", "▁say", "▁a"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def with_tags(tokenizer: PreTrainedTokenizerFast, *special: str) -> PreTrainedTokenizerFast:
    """With TAGS as tokens that are text, as in Qwen3's, and after them special ones."""
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return tokenizer


def fake_logprob(token: int, alternatives: int) -> TokenLogprob:
    """Token t has -t / 100; the likeliest ones are 65 (A) with -0.65, 66, ..., and so the token is among them or not."""
    return TokenLogprob(token, -token / 100, tuple((65 + rank, -(65 + rank) / 100) for rank in range(alternatives)))


class FakeEngine:
    """Continues every prompt with `text`, two tokens a step after the first, whatever the prompt is."""

    def __init__(self) -> None:
        self.tokenizer = byte_tokenizer()
        self.grammars = Grammars(self.tokenizer, VOCABULARY, ())
        self.runner = SimpleNamespace(programs=SimpleNamespace(stop=lambda: None))
        self.params: list[SamplingParams] = []
        """Of every request that was added."""
        self.prompts: list[tuple[int, ...]] = []
        self.priorities: list[int] = []
        self.salts: list[str | None] = []
        self.timeouts: list[float | None] = []
        self.clock = time.monotonic
        self.waited: list[float] = []
        """Seconds between a request's coming and its addition."""
        self.room: float = math.inf
        """So many requests may be unfinished; one more is refused."""
        self.tree = TREE
        """Of requests that ask for none."""
        self.text = TEXT
        """What every prompt is continued with, again and again."""
        self.adaptive: AdaptiveState | None = None
        self.cached_tokens = 0
        """What requests report."""
        self.flushes = 0
        self.withdrawn: list[str] = []
        self.aborted: list[str] = []
        """Ids of the requests that were aborted while unfinished."""
        self._allowance = threading.Condition()
        self._allowed: float = math.inf
        self.failures = 0
        """In so many of the next steps the device fails, and all requests with it."""
        self.crash: Exception | None = None
        """What the next step raises."""
        self.ends_with: str | None = None
        """The finish_reason that the next step ends the first request with, from outside."""
        self.steps = 0
        self._counts = EngineStats(
            total_pages=10, page_size=16, drafted_by_source={"head": 0, "ngram": 0}, accepted_by_source={"head": 0, "ngram": 0}
        )
        self._requests: dict[str, Request] = {}
        self._names = (f"request-{number}" for number in itertools.count())
        self._finished: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def running(self) -> int:
        return len(self._requests)

    def allow(self, steps: float) -> None:
        """So many more steps are done, math.inf for all; the one after them waits for the next call."""
        with self._allowance:
            self._allowed = steps
            self._allowance.notify()

    def add(self, asked: GenerationRequest, request_id: str | None = None, *, came: float | None = None) -> Request:
        prompt, params = asked.prompt, asked.params
        assert params.n == 1
        request_id = next(self._names) if request_id is None else request_id
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is in use by an unfinished request: choose another")
        if len(self._requests) >= self.room:
            raise QueueFull(f"{len(self._requests)} requests wait already and max_waiting_requests is {self.room}: try again later")
        wrong = [token for token in prompt if not 0 <= token < VOCABULARY]
        if wrong:
            raise ValueError(f"prompt holds token id {wrong[0]}; ids are 0 to {VOCABULARY - 1}")
        self.params.append(params)
        self.prompts.append(tuple(prompt))
        self.priorities.append(asked.priority)
        self.salts.append(asked.cache_salt)
        self.timeouts.append(asked.timeout)
        self.waited.append(0 if came is None else self.clock() - came)
        detokenizer = replace(asked, prompt=()).detokenizer(self.tokenizer)
        request = Request(request_id, asked, 0, params.stop_token_ids, detokenizer, tree=asked.tree)
        request.cached_tokens = self.cached_tokens
        if (count := params.prompt_logprobs) is not None:
            request.prompt_logprobs[1:] = [fake_logprob(token, count) for token in prompt[1:]]
        request.added_at = request.launched_at = perf_counter()
        self._requests[request_id] = request
        self._counts.prompt_tokens += len(prompt)
        return request

    def withdraw(self, request_id: str) -> None:
        self._counts.prompt_tokens -= len(self._requests.pop(request_id).prompt)
        self.withdrawn.append(request_id)

    def abort(self, request_id: str) -> Update | None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        self.aborted.append(request_id)
        request.finish_reason = "abort"
        self._leave(request)
        return Update(request_id, "", (), request.result())

    def flush_cache(self) -> None:
        self.flushes += 1

    def step(self) -> list[Update]:
        with self._allowance:
            assert self._allowance.wait_for(lambda: self._allowed > 0, timeout=20)
            self._allowed -= 1
        self.steps += 1
        if self.crash is not None:
            raise self.crash
        if self.failures:
            self.failures -= 1
            self._counts.failed_steps += 1
            return [self._end(request, "error") for request in list(self._requests.values())]
        self._counts.failed_steps = 0
        first = next(iter(self._requests.values()), None)
        if first is not None and self.ends_with is not None:
            reason, self.ends_with = self.ends_with, None
            return [self._end(first, reason)]
        return [self._advance(request) for request in list(self._requests.values())]

    def _end(self, request: Request, reason: str) -> Update:
        del self._requests[request.id]
        request.finish_reason, request.error = reason, "secret: /home/someone/weights"
        self._leave(request)
        return Update(request.id, "", (), request.result())

    def _leave(self, request: Request) -> None:
        assert request.finish_reason is not None
        request.finished_at = perf_counter()
        self._finished[request.finish_reason] += 1

    def _advance(self, request: Request) -> Update:
        endless = self.text.encode() * 100
        shown, new, verification = len(request.detokenizer.text), [], None
        for _ in range(2 if request.output else 1):
            token = endless[len(request.output)]
            request.tokens.append(token)
            new.append(token)
            request.detokenizer.add([token], ends_with_stop=token in request.stop_token_ids)
            if token in request.stop_token_ids:
                request.finish_reason, request.matched_stop = "stop", token
            elif request.detokenizer.matched is not None:
                request.finish_reason, request.matched_stop = "stop", request.detokenizer.matched
            elif len(request.output) == request.params.max_tokens:
                request.finish_reason = "length"
            if request.finish_reason:
                break
        self._counts.generated_tokens += len(new)
        request.first_token_at = request.first_token_at or perf_counter()
        if len(request.output) > len(new):
            spec = request.tree or self.tree
            accepted = min(1, spec.num_steps)
            request.cycles.append(CycleCounts(len(new), accepted, spec.num_draft_tokens - 1, spec.num_steps, ("ngram",) * accepted))
            pruning = None if request.params.constraint is None else Pruning(tuple(b"{["), 1)
            drafted = DraftedTree((request.tokens[-len(new) - 1], new[0], 63), (-1, 0, 0), (0, 1), ("ngram", "head"), pruning)
            verification = Verification(spec, accepted, drafted if request.asked.wants_trees and accepted else None)
            self._counts.verify_count += 1
            self._counts.verified_tokens += len(new)
        if request.finish_reason:
            request.detokenizer.finish()
            del self._requests[request.id]
            request.status = Status.FINISHED
            self._leave(request)
        logprobs = None
        if (count := request.params.logprobs) is not None:
            logprobs = tuple(fake_logprob(token, count) for token in new)
            request.logprobs += logprobs
        output = request.result() if request.finish_reason else None
        return Update(
            request.id, request.detokenizer.text[shown:], tuple(new), output, logprobs, verification,
            text_start=shown, text_offsets=request.detokenizer.offsets_of(request.generated - len(new), len(new)),
        )  # fmt: skip

    def stats(self) -> EngineStats:
        drafts = self._counts.verify_count  # of each, one token is accepted
        return replace(
            self._counts,
            running=self.running,
            used_pages=self.running,
            adaptive=self.adaptive,
            finished=dict(self._finished),
            draft_count=drafts,
            draft_tokens=drafts * (TREE.num_draft_tokens - 1),
            accepted_tokens=drafts,
            accepted_per_position=(drafts, *[0] * (TREE.num_steps - 1)),
        )


class SlowEngine(FakeEngine):
    """Twenty steps a second."""

    def step(self) -> list[Update]:
        time.sleep(0.05)
        return super().step()
