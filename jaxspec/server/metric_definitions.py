"""What /metrics shows: every number's name, meaning and source. docs/metrics.md lists them; a test compares the two.

Names follow Prometheus' rules: a prefix, the unit last, `_total` after counters. Where vLLM has the same number, `alias` is its
name for it, so that what reads vLLM's metrics (its benchmark, dashboards, Kubernetes' inference gateway) reads ours.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxspec.engine.request import GenerationOutput
from jaxspec.engine.stats import EngineStats

PREFIX = "jaxspec:"
ALIAS_PREFIX = "vllm:"
REASONS = ("stop", "length", "abort", "timeout", "error")
"""Every finish_reason: each is shown from the start, as a rate needs a zero to begin at."""


class EngineMetric(NamedTuple):
    """One number of EngineStats, or one per value of a label. A counter if the name ends in _total, else a gauge."""

    name: str
    """Without the prefix."""
    meaning: str
    read: Callable[[EngineStats], float | Mapping[str, float]]
    alias: str | None = None
    """vLLM's name, without the prefix."""
    label: str | None = None
    """What the keys are that `read` returns; None: it returns one number."""


class RequestMetric(NamedTuple):
    """A histogram over the requests that ended, whatever the reason."""

    name: str
    meaning: str
    read: Callable[[GenerationOutput], float | None]
    """None: this request has no such number."""
    buckets: tuple[float, ...]
    """Upper bounds; one without bound comes after them."""
    alias: str | None = None


def time_per_output_token(output: GenerationOutput) -> float | None:
    """Seconds from the first token to the end, per token after the first; None if there is none."""
    first, later = output.timing.first_token_seconds, len(output.token_ids) - 1
    return None if first is None or later < 1 else (output.timing.total_seconds - first) / later


def _per_reason(stats: EngineStats) -> Mapping[str, float]:
    return dict.fromkeys(REASONS, 0) | dict(stats.finished)


def _per_position(stats: EngineStats) -> Mapping[str, float]:
    return {str(position): count for position, count in enumerate(stats.accepted_per_position)}


REQUESTS_AND_TOKENS = (
    EngineMetric("running_requests", "Requests in the batch: prefilling or decoding.",
                 lambda stats: stats.running, "num_requests_running"),
    EngineMetric("waiting_requests", "Requests in the queue, preempted ones included.",
                 lambda stats: stats.waiting, "num_requests_waiting"),
    EngineMetric("finished_requests_total", "Requests that ended, by finish_reason.",
                 _per_reason, "request_success_total", "finished_reason"),
    EngineMetric("prompt_tokens_total", "Tokens of the prompts that were taken in, cached ones included.",
                 lambda stats: stats.prompt_tokens, "prompt_tokens_total"),
    EngineMetric("prefilled_tokens_total", "Tokens that prefill computed; cached ones are not among them.",
                 lambda stats: stats.prefilled_tokens),
    EngineMetric("generated_tokens_total", "Tokens that were generated.",
                 lambda stats: stats.generated_tokens, "generation_tokens_total"),
    EngineMetric("preemptions_total", "Times that a request gave up its pages to others and waited again.",
                 lambda stats: stats.preemptions, "num_preemptions_total"),
)  # fmt: skip

SPECULATION = (
    EngineMetric("verifications_total", "Verifications, counted per request; plain decoding is one without drafts.",
                 lambda stats: stats.verify_count),
    EngineMetric("verified_tokens_total", "Tokens that verifications emitted, bonus tokens included.",
                 lambda stats: stats.verified_tokens),
    EngineMetric("drafts_total", "Verifications of a draft tree: all but plain decoding.",
                 lambda stats: stats.draft_count, "spec_decode_num_drafts_total"),
    EngineMetric("draft_tokens_total", "Drafted tokens that were verified: the nodes below the roots.",
                 lambda stats: stats.draft_tokens, "spec_decode_num_draft_tokens_total"),
    EngineMetric("accepted_tokens_total", "Drafted tokens that were accepted.",
                 lambda stats: stats.accepted_tokens, "spec_decode_num_accepted_tokens_total"),
    EngineMetric("accepted_tokens_per_position_total", "Drafted tokens that were accepted, by depth in the tree: 0 is the first.",
                 _per_position, "spec_decode_num_accepted_tokens_per_pos_total", "position"),
)  # fmt: skip

CACHE = (
    EngineMetric("cache_used_pages", "Pages that requests hold; shared ones count once.",
                 lambda stats: stats.used_pages),
    EngineMetric("cache_cached_pages", "Pages that only the prefix cache holds; evicted when requests need them.",
                 lambda stats: stats.cached_pages),
    EngineMetric("cache_total_pages", "Pages there are.",
                 lambda stats: stats.total_pages),
    EngineMetric("cache_page_size_tokens", "Tokens per page.",
                 lambda stats: stats.page_size),
    EngineMetric("cache_usage_ratio", "Used pages by all pages: 1 is full.",
                 lambda stats: stats.used_pages / max(1, stats.total_pages), "kv_cache_usage_perc"),
    EngineMetric("prefix_cache_queried_tokens_total", "Tokens that were looked up in the prefix cache.",
                 lambda stats: stats.prefix_queried_tokens, "prefix_cache_queries_total"),
    EngineMetric("prefix_cache_hit_tokens_total", "Tokens that were found there.",
                 lambda stats: stats.prefix_hit_tokens, "prefix_cache_hits_total"),
)  # fmt: skip

TIME_AND_FAILURES = (
    EngineMetric("cycles_total", "Draft-and-verify cycles, one per batch.",
                 lambda stats: stats.cycles),
    EngineMetric("step_seconds_total", "Time that the engine worked, the next two included.",
                 lambda stats: stats.step_seconds),
    EngineMetric("device_wait_seconds_total", "Time that it waited for the device.",
                 lambda stats: stats.waiting_seconds),
    EngineMetric("launch_seconds_total", "Time that it handed programs to the device; a CPU computes part of them meanwhile.",
                 lambda stats: stats.launching_seconds),
    EngineMetric("failed_steps_in_a_row", "Steps that failed since the last one that did not.",
                 lambda stats: stats.failed_steps),
)  # fmt: skip

ENGINE_METRICS = REQUESTS_AND_TOKENS + SPECULATION + CACHE + TIME_AND_FAILURES

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)
SECONDS_PER_TOKEN = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5
)  # fmt: skip
TOKENS = tuple(float(digit * 10**zeros) for zeros in range(6) for digit in (1, 2, 5))
ACCEPT_LENGTHS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)

REQUEST_METRICS = (
    RequestMetric("queue_seconds", "From arrival to the launch of a request's first chunk, or to its end if none was.",
                  lambda output: output.timing.queue_seconds, SECONDS, "request_queue_time_seconds"),
    RequestMetric("time_to_first_token_seconds", "From arrival to the first token, of requests that had one.",
                  lambda output: output.timing.first_token_seconds, SECONDS, "time_to_first_token_seconds"),
    RequestMetric("time_per_output_token_seconds", "From the first token to the end, per token after the first.",
                  time_per_output_token, SECONDS_PER_TOKEN, "request_time_per_output_token_seconds"),
    RequestMetric("request_seconds", "From arrival to the end.",
                  lambda output: output.timing.total_seconds, SECONDS, "e2e_request_latency_seconds"),
    RequestMetric("request_prompt_tokens", "Tokens of the prompt.",
                  lambda output: len(output.prompt_token_ids), TOKENS, "request_prompt_tokens"),
    RequestMetric("request_generated_tokens", "Tokens that were generated.",
                  lambda output: len(output.token_ids), TOKENS, "request_generation_tokens"),
    RequestMetric("request_accept_length_tokens", "Tokens per verification of a draft tree, bonus included, of requests with one.",
                  lambda output: output.speculation.tree_accept_length, ACCEPT_LENGTHS),
)  # fmt: skip
