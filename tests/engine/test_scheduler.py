"""Scheduling: chunks, admission, growth, preemption, order."""

import math
from dataclasses import replace

import pytest

from jaxspec.engine.pages import PageAllocator, PrefixCache
from jaxspec.engine.request import GenerationRequest, Request, Status
from jaxspec.engine.scheduler import Scheduler, StepPlan
from jaxspec.sampling_params import SamplingParams
from jaxspec.text.detokenizer import Detokenizer


def scheduler_of(num_pages: int = 1000, page_size: int = 4, rows: int = 8, chunk: int = 64) -> Scheduler:
    return Scheduler(PrefixCache(PageAllocator(num_pages, page_size)), rows, chunk)


def added(
    scheduler: Scheduler,
    name: str,
    prompt: int | tuple[int, ...],
    max_tokens: int = 4,
    logprobs: int | None = None,
    priority: int = 0,
    **fields,
) -> Request:
    """A new request, in the order of these calls. An int is the length of a prompt that no other request has."""
    arrival = added.calls = added.calls + 1
    tokens = tuple(range(arrival * 10_000, arrival * 10_000 + prompt)) if isinstance(prompt, int) else prompt
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=logprobs)
    request = Request(name, GenerationRequest(tokens, params, priority), 0, (), Detokenizer(None), arrival=arrival, **fields)
    scheduler.add(request)
    return request


added.calls = 0


def chunks(plan: StepPlan) -> list[tuple[str, int, int]]:
    """Name, first slot and size of every chunk of the plan."""
    return [(step.request.id, step.first_slot, step.size) for step in plan.prefills]


def names(requests: list[Request]) -> str:
    return " ".join(request.id for request in requests)


def generate(request: Request, tokens: int) -> None:
    """As if this many tokens had been launched and read."""
    request.tokens += range(tokens)


# Prefill


def test_a_prompt_is_computed_in_chunks_and_runs_from_the_next_plan_on():
    scheduler = scheduler_of(chunk=16)
    request = added(scheduler, "a", 40)
    plans = [scheduler.plan(4) for _ in range(3)]
    assert [chunks(plan) for plan in plans] == [[("a", 0, 16)], [("a", 16, 16)], [("a", 32, 8)]]
    assert [plan.prefills[0].is_last for plan in plans] == [False, False, True]
    assert [plan.prefills[0].cached for plan in plans] == [0, 16, 32]
    assert [names(plan.newly_admitted) for plan in plans] == ["a", "", ""] and not any(plan.cycle for plan in plans)
    assert request.status is Status.RUNNING and request.prefilled == 40
    assert scheduler.plan(4) == StepPlan([], [], [request])


def test_a_request_takes_half_of_the_budget_while_another_comes_behind():
    scheduler = scheduler_of(chunk=512)
    for name, prompt in (("a", 1000), ("b", 20), ("c", 1000)):
        added(scheduler, name, prompt)
    assert chunks(scheduler.plan(4)) == [("a", 0, 256), ("b", 0, 20), ("c", 0, 236)]
    assert chunks(scheduler.plan(4)) == [("a", 256, 256), ("c", 236, 256)]
    assert chunks(scheduler.plan(4)) == [("a", 512, 256), ("c", 492, 256)]
    assert chunks(scheduler.plan(4)) == [("a", 768, 232), ("c", 748, 252)]


def test_no_chunk_is_smaller_than_sixteen_tokens_unless_it_ends_the_prompt():
    scheduler = scheduler_of(chunk=70)
    for name in "abcd":
        added(scheduler, name, 100)
    assert chunks(scheduler.plan(4)) == [("a", 0, 35), ("b", 0, 18), ("c", 0, 17)]  # 17 can't be halved
    scheduler = scheduler_of(chunk=70)
    for name, prompt in (("a", 60), ("b", 5)):
        added(scheduler, name, prompt)
    assert chunks(scheduler.plan(4)) == [("a", 0, 35), ("b", 0, 5)]
    assert chunks(scheduler.plan(4)) == [("a", 35, 25)]
    scheduler = scheduler_of(chunk=64)
    for name, prompt in (("a", 30), ("b", 20), ("c", 10), ("d", 100)):
        added(scheduler, name, prompt)
    assert chunks(scheduler.plan(4)) == [("a", 0, 30), ("b", 0, 17), ("c", 0, 10)]  # 7 tokens are left


@pytest.mark.parametrize(("chunk", "sizes"), [(1, [1]), (2, [1, 1]), (7, [4, 3]), (20, [10, 10])])
def test_a_small_budget_is_halved_once(chunk, sizes):
    scheduler = scheduler_of(chunk=chunk)
    for name in "abc":
        added(scheduler, name, 100)
    assert [size for _, _, size in chunks(scheduler.plan(4))] == sizes


def test_more_important_prompts_come_first_even_in_the_middle_of_others():
    scheduler = scheduler_of(chunk=64)
    added(scheduler, "a", 100)
    assert chunks(scheduler.plan(4)) == [("a", 0, 64)]
    added(scheduler, "b", 40)
    added(scheduler, "c", 100, priority=1)
    assert chunks(scheduler.plan(4)) == [("c", 0, 32), ("a", 64, 16), ("b", 0, 16)]


# The prefix cache


def test_a_known_prefix_is_not_computed_again_except_for_its_last_token():
    scheduler = scheduler_of()
    scheduler.finish(_computed(scheduler, tuple(range(16))))
    request = added(scheduler, "again", tuple(range(13)) + (99,) * 7)
    (step,) = scheduler.plan(4).prefills
    assert (step.first_slot, step.size, step.cached, step.is_last) == (11, 9, 12, True)
    assert request.cached_tokens == 12 and step.pages == request.held.pages
    assert (scheduler.counts.prefix_queried_tokens, scheduler.counts.prefix_hit_tokens) == (16 + 20, 12)


def test_a_prompt_that_is_known_as_a_whole_takes_a_chunk_of_one_token():
    scheduler = scheduler_of()
    scheduler.finish(_computed(scheduler, tuple(range(16))))
    request = added(scheduler, "again", tuple(range(16)))
    (step,) = scheduler.plan(4).prefills
    assert (step.first_slot, step.size, step.cached, step.is_last) == (15, 1, 16, True)
    assert request.cached_tokens == 16 and request.status is Status.RUNNING


def test_copies_of_a_prompt_share_their_work_from_the_first_plan_on():
    scheduler = scheduler_of(chunk=64)
    prompt = tuple(range(80))
    a, b = added(scheduler, "a", prompt), added(scheduler, "b", prompt)
    assert chunks(scheduler.plan(4)) == [("a", 0, 32), ("b", 31, 32)]  # 63 tokens are known
    assert b.cached_tokens == 32
    plan = scheduler.plan(4)
    assert chunks(plan) == [("a", 59, 21), ("b", 79, 1)] and plan.prefills[0].cached == 60
    assert a.held.pages[:20] == b.held.pages[:20] and a.cached_tokens == 0
    scheduler.cache.check([a.held, b.held])


def test_the_first_request_starts_and_the_copy_of_a_short_prompt_uses_it_in_the_same_plan():
    scheduler = scheduler_of(chunk=64)
    for name in "ab":
        added(scheduler, name, tuple(range(20)))
    assert chunks(scheduler.plan(4)) == [("a", 0, 20), ("b", 19, 1)]


def test_prompt_logprobs_need_the_whole_prompt():
    scheduler = scheduler_of()
    scheduler.finish(_computed(scheduler, tuple(range(16))))
    known = replace(scheduler.counts)
    request = added(scheduler, "again", tuple(range(16)), logprobs=0)
    (step,) = scheduler.plan(4).prefills
    assert (step.first_slot, step.size, step.cached, request.cached_tokens) == (0, 16, 0, 0)
    assert scheduler.counts == known
    # Its pages were known, so it shares the known ones now; the chunk still writes to its own.
    assert len(request.held.nodes) == 4 and not set(step.pages) & {node.page for node in request.held.nodes}
    scheduler.cache.check([request.held])


@pytest.mark.parametrize(("output", "lag", "pages"), [(2, 0, 1), (3, 0, 2), (3, 1, 1), (4, 1, 2)])
def test_a_finished_request_leaves_its_output_but_not_what_is_still_uncommitted(output, lag, pages):
    scheduler = scheduler_of()
    request = _computed(scheduler, tuple(range(6)), max_tokens=6)
    generate(request, output)
    request.held.lag = lag  # beside the newest token, which is never in the cache
    scheduler.finish(request)
    held = scheduler.cache.match(request.tokens)
    assert len(held.pages) == pages
    scheduler.cache.release(held)


def _computed(scheduler: Scheduler, prompt: tuple[int, ...], max_tokens: int = 4) -> Request:
    request = added(scheduler, "computed", prompt, max_tokens)
    assert scheduler.plan(4).prefills[0].is_last
    return request


# Admission


@pytest.mark.parametrize(("num_pages", "is_admitted"), [(16, False), (17, True)])
def test_admission_leaves_pages_for_two_cycles_of_the_others(num_pages, is_admitted):
    scheduler = scheduler_of(num_pages=num_pages)
    added(scheduler, "a", 16, max_tokens=20)
    scheduler.plan(4)  # 5 pages: 16 + 4 tokens
    scheduler.plan(4)
    added(scheduler, "b", 36, max_tokens=20)  # 10 pages: 36 + 4 tokens; then a may need 2 more: 2 * 4 tokens
    assert bool(scheduler.plan(4).newly_admitted) is is_admitted
    assert scheduler.cache.pages.free == (num_pages - 5 if not is_admitted else 2)


def test_alone_a_request_needs_no_headroom():
    scheduler = scheduler_of(num_pages=5)
    added(scheduler, "a", 16, max_tokens=4)
    assert names(scheduler.plan(4).newly_admitted) == "a" and scheduler.cache.pages.free == 0


def test_a_request_that_all_pages_are_too_few_for_is_refused():
    with pytest.raises(ValueError, match="are 21 tokens together, more than the 20 that the cache holds"):
        added(scheduler_of(num_pages=5), "a", 17, max_tokens=4)


# Cycles and preemption


def test_pages_grow_by_what_a_cycle_can_emit():
    scheduler = scheduler_of(page_size=1)
    request = added(scheduler, "a", 10, max_tokens=12)
    scheduler.plan(5)
    assert len(request.held.pages) == 15
    generate(request, 1)
    scheduler.plan(5)
    assert len(request.held.pages) == 16
    request.in_flight, request.in_flight_tokens = 1, 5
    scheduler.plan(5)
    assert len(request.held.pages) == 21
    generate(request, 5)
    scheduler.plan(5)
    assert len(request.held.pages) == 22, "never more than prompt and max_tokens"


def test_a_request_in_the_middle_of_its_prefill_is_preempted_too():
    scheduler = scheduler_of(num_pages=16, chunk=16)
    a = added(scheduler, "a", 8, max_tokens=50)
    scheduler.plan(4)
    b = added(scheduler, "b", 30)
    assert chunks(scheduler.plan(4)) == [("b", 0, 16)]
    generate(a, 25)
    assert scheduler.plan(4) == StepPlan([], [], [a]) and scheduler.waiting == [b]
    # Its chunk was launched, so what remains of those pages in the cache is not computed again.
    scheduler.finish(a)
    (step,) = scheduler.plan(4).prefills
    assert (step.request, step.first_slot, step.cached) == (b, 15, 16) and b.cached_tokens == 0


def test_a_preempted_request_computes_its_prompt_and_output_before_it_goes_on():
    scheduler = scheduler_of()
    request = added(scheduler, "a", 8, max_tokens=40)
    scheduler.plan(4)
    generate(request, 5)
    scheduler.preempt(request)  # 12 slots are committed: three pages
    (step,) = scheduler.plan(4).prefills
    assert (step.first_slot, step.size, step.cached, step.is_last) == (11, 2, 12, True)
    assert request.cached_tokens == 0 and scheduler.counts.prefix_queried_tokens == 8, "only the first admission counts"


# Ends


def test_deadlines():
    scheduler = scheduler_of(rows=1)
    a, b = added(scheduler, "a", 8, deadline=5.0), added(scheduler, "b", 8, deadline=3.0)
    added(scheduler, "c", 8)
    assert scheduler.expired(2.9) == [] and scheduler.expired(3.0) == [b] and scheduler.expired(9.0) == [b, a]
    scheduler.plan(4)
    scheduler.finish(a)
    assert scheduler.expired(9.0) == [b] and scheduler.expired(math.inf) == [b]
