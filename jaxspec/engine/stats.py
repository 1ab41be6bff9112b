"""The engine's counters and current load. Plain Python, no JAX.

A number is declared once, as a field of EngineStats: its name in Python, its name and meaning at /metrics, and the names
that vLLM and SGLang have for it.
The engine counts in one EngineStats (`Engine.counts`) and hands out copies (`Engine.stats`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from jaxspec.tree_shape import TreeShape

SAMPLING = ("greedy", "sampled")
FINISH_REASONS = ("stop", "length", "abort", "timeout", "error")


class AdaptiveState(NamedTuple):
    """The trees of an adaptive engine and the estimates behind its choice."""

    current: TreeShape
    """The tree in use, apart from probes."""
    best: dict[int, TreeShape]
    """The tree that looks fastest, per compiled batch size with known cycle times."""
    accept_lengths: dict[TreeShape, float]
    """Estimated tokens per verification, bonus included, in the mean text of the last cycles."""
    seconds: dict[tuple[TreeShape, int], float]
    """Time of one cycle, per tree and compiled batch size."""
    switches: int
    """How often a cycle used another tree than the cycle before it."""
    probes: int
    """How often a tree out of use was tried for a few cycles."""


def metric(
    name: str, meaning: str, aliases: str = "", *, label: str | None = None, labels: Sequence[str] | None = None
) -> Any:  # fmt: skip
    """A field of EngineStats that /metrics shows: a number, or one number per value of `label`.

    Args:
        name: without the prefix. By Prometheus' rules the unit comes last, and `_total` after counters.
        aliases: the names of the same number at other servers, with their prefixes.
        labels: values of the label that are shown from the start, as a rate needs a zero to begin at. None: they are numbers.
    """
    shown = {"name": name, "meaning": meaning, "aliases": aliases, "label": label, "labels": tuple(labels or ())}
    if label is None:
        return field(default=0, metadata=shown)
    return field(default_factory=list if labels is None else Counter, metadata=shown)


@dataclass
class EngineStats:
    """Counters are totals since the start: take differences for rates. A field's meaning is its metric's."""

    running: int = metric(
        "running_requests", "Requests in the batch: prefilling or decoding.", "vllm:num_requests_running sglang:num_running_reqs"
    )
    waiting: int = metric(
        "waiting_requests", "Requests in the queue, preempted ones included.", "vllm:num_requests_waiting sglang:num_queue_reqs"
    )
    finished: Counter[str] = metric(
        "finished_requests_total", "Requests that ended, by finish_reason.", "vllm:request_success_total",
        label="finished_reason", labels=FINISH_REASONS,
    )  # fmt: skip
    prompt_tokens: int = metric(
        "prompt_tokens_total",
        "Tokens of the accepted requests' prompts, cached ones included.",
        "vllm:prompt_tokens_total sglang:prompt_tokens_total",
    )
    prefilled_tokens: int = metric("prefilled_tokens_total", "Tokens that prefill computed, cached ones excluded.")
    generated_tokens: int = metric(
        "generated_tokens_total", "Tokens that were generated.", "vllm:generation_tokens_total sglang:generation_tokens_total"
    )
    preemptions: int = metric(
        "preemptions_total", "Times that a request gave up its pages and waited again.", "vllm:num_preemptions_total"
    )

    verify_count: int = metric(
        "verifications_total", "Verifications, counted per request; a plain decoding step counts as one without drafts."
    )
    verified_tokens: int = metric("verified_tokens_total", "Tokens that verifications emitted, bonus tokens included.")
    draft_count: int = metric(
        "drafts_total", "Verifications of a draft tree; plain decoding adds none.", "vllm:spec_decode_num_drafts_total"
    )
    draft_tokens: int = metric(
        "draft_tokens_total", "Drafted tokens that were verified: tree nodes without the roots.",
        "vllm:spec_decode_num_draft_tokens_total",
    )  # fmt: skip
    accepted_tokens: int = metric(
        "accepted_tokens_total", "Drafted tokens that were accepted.", "vllm:spec_decode_num_accepted_tokens_total"
    )
    accepted_per_position: list[int] = metric(
        "accepted_tokens_per_position_total", "Accepted drafted tokens by depth in the tree; 0 is the first level.",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total", label="position",
    )  # fmt: skip
    drafts_by_sampling: Counter[str] = metric(
        "drafts_by_sampling_total", "Verifications of a draft tree, of greedy and of sampled requests.",
        label="sampling", labels=SAMPLING,
    )  # fmt: skip
    accepted_by_sampling: Counter[str] = metric(
        "accepted_tokens_by_sampling_total", "Drafted tokens that were accepted, of greedy and of sampled requests.",
        label="sampling", labels=SAMPLING,
    )  # fmt: skip
    drafted_by_source: Counter[str] = metric(
        "draft_tokens_by_source_total", "Drafted tokens, by who proposed them. Merged drafters only.",
        label="source", labels=(),
    )  # fmt: skip
    accepted_by_source: Counter[str] = metric(
        "accepted_tokens_by_source_total", "Drafted tokens that were accepted, by who proposed them. Merged drafters only.",
        label="source", labels=(),
    )  # fmt: skip

    lent_texts: int = metric(
        "ngram_lent_texts_total", "Stretches of other requests' texts that n-gram drafts of a running request were lent."
    )
    constrained_requests: int = metric("constrained_requests_total", "Requests under a grammar (JSON schema, regex and so on).")
    mask_seconds: float = metric(
        "grammar_mask_seconds_total",
        "Time that the engine took to make masks of grammars, between the halves of cycles.",
    )
    pruned_tokens: int = metric("grammar_pruned_tokens_total", "Drafted tokens that a grammar did not allow.")
    forced_tokens: int = metric("grammar_forced_tokens_total", "Tokens drafted because a grammar leaves nothing else.")

    used_pages: int = metric("cache_used_pages", "Pages held by requests; shared pages count once.")
    cached_pages: int = metric("cache_cached_pages", "Pages held only by the prefix cache; evicted when requests need them.")
    total_pages: int = metric("cache_total_pages", "Pages of the cache.")
    page_size: int = metric("cache_page_size_tokens", "Tokens per page.")
    prefix_queried_tokens: int = metric(
        "prefix_cache_queried_tokens_total", "Tokens looked up in the prefix cache.", "vllm:prefix_cache_queries_total"
    )
    prefix_hit_tokens: int = metric(
        "prefix_cache_hit_tokens_total", "Tokens found in the prefix cache.", "vllm:prefix_cache_hits_total"
    )

    cycles: int = metric("cycles_total", "Draft-and-verify cycles, one per batch.")
    step_seconds: float = metric("step_seconds_total", "Time that the engine worked, the next two metrics included.")
    waiting_seconds: float = metric("device_wait_seconds_total", "Time that the engine waited for the device.")
    launching_seconds: float = metric(
        "launch_seconds_total", "Time that the engine took to launch programs; a CPU computes part of them meanwhile."
    )
    uploaded_arrays: int = metric(
        "uploaded_arrays_total",
        "Arrays that launches copied to the device: prompts, settings, and the rows and page tables of a batch when they change.",
    )
    uploaded_bytes: int = metric("uploaded_bytes_total", "Bytes of these arrays.")
    failed_steps: int = metric("failed_steps_in_a_row", "Steps that failed since the last successful one.")

    adaptive: AdaptiveState | None = None
    """The trees in use. None: the engine is not adaptive and always uses the configured tree."""

    def snapshot(self, **load: Any) -> "EngineStats":
        """A copy for other threads, in which nothing counts any further, with these numbers of the current load."""
        counted = {metric.attribute: vars(self)[metric.attribute] for metric in ENGINE_METRICS if metric.label is not None}
        load |= {name: dict(each) if isinstance(each, Mapping) else tuple(each) for name, each in counted.items()}
        return replace(self, **load)

    def since(self, before: "EngineStats") -> "EngineStats":
        """Single counters as differences from earlier stats; everything else as it is now."""
        counters = [metric.attribute for metric in ENGINE_METRICS if metric.name.endswith("_total") and metric.label is None]
        return replace(self, **{name: vars(self)[name] - vars(before)[name] for name in counters})

    @property
    def accept_length(self) -> float | None:
        """Tokens per verification, bonus included; None before the first one."""
        return self.verified_tokens / self.verify_count if self.verify_count else None

    @property
    def throughput(self) -> float:
        """Generated tokens per second of work."""
        return self.generated_tokens / self.step_seconds if self.step_seconds > 0 else 0.0

    @property
    def host_seconds(self) -> float:
        """Time in the engine itself: scheduling, pages, reading results, text. Divide by cycles for the host's share of one.
        Where the device is a CPU, its threads slow this down too."""
        return self.step_seconds - self.waiting_seconds - self.launching_seconds

    @property
    def cache_hit_rate(self) -> float:
        """The share of prompt tokens that the prefix cache had."""
        return self.prefix_hit_tokens / max(1, self.prefix_queried_tokens)

    @property
    def cache_usage(self) -> float:
        """Used pages divided by all pages: 1.0 is full."""
        return self.used_pages / max(1, self.total_pages)

    @property
    def total_tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.total_pages * self.page_size

    @property
    def used_tokens(self) -> int:
        """Tokens for which pages are used; the last page of a text counts in full."""
        return self.used_pages * self.page_size


class EngineMetric(NamedTuple):
    """One number of EngineStats at /metrics, or one per value of a label. A counter if the name ends in _total, else a gauge."""

    name: str
    """Without the prefix."""
    meaning: str
    attribute: str
    """Of EngineStats."""
    aliases: str = ""
    """The names of the same number at other servers, with their prefixes."""
    label: str | None = None
    """The label whose values are the keys that `read` returns. None: it returns one number."""
    labels: tuple[str, ...] = ()

    def read(self, stats: EngineStats) -> float | Mapping[str, float]:
        """The number, or the numbers by the label's values."""
        value = getattr(stats, self.attribute)
        if self.label is None:
            return value
        values = value if isinstance(value, Mapping) else {str(index): each for index, each in enumerate(value)}
        return dict.fromkeys(self.labels, 0) | dict(values)


ENGINE_METRICS = (
    *(EngineMetric(attribute=item.name, **item.metadata) for item in fields(EngineStats) if item.metadata),
    EngineMetric(
        "cache_usage_ratio",
        "Used pages divided by all pages: 1 is full.",
        "cache_usage",
        "vllm:kv_cache_usage_perc sglang:token_usage",
    ),
    EngineMetric(
        "prefix_cache_hit_ratio",
        "Tokens found in the prefix cache, of all that were looked up.",
        "cache_hit_rate",
        "sglang:cache_hit_rate",
    ),
)  # fmt: skip
"""Everything about the engine that /metrics shows."""
