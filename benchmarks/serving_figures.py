"""Figures of a load, from the answers, and their tables. None is unknown, and never guessed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.commands.common import table

if TYPE_CHECKING:
    from .client import Answer

LATE_MS, PAUSE_MS = 50.0, 100.0
"""Delays of this client above which a note is printed."""
LATENCIES = {
    "time_to_first_token": "time to first token (TTFT)",
    "time_per_output_token": "time per output token (TPOT)",
    "inter_token_latency": "inter-token latency, per token",
    "gap_between_chunks": "gap between chunks",
    "end_to_end_latency": "end-to-end latency",
}
PERCENTILES = (50, 90, 99)


@dataclass
class Run:
    """The answers to a load, in the order of the requests, and this client's own delays in seconds."""

    answers: "list[Answer]" = field(default_factory=list)
    worst_lateness: float = 0.0
    """Of a request behind its schedule."""
    worst_wait: float = 0.0
    """Of a due request for a free slot (max_concurrency). No latency includes it."""
    worst_pause: float = 0.0
    """Of the event loop: single times may be too long by this."""

    @property
    def duration(self) -> float:
        """From the first request to the last answer."""
        return max(answer.ended for answer in self.answers) - min(answer.sent for answer in self.answers)

    @property
    def peak_concurrency(self) -> int:
        """The largest number of requests in flight."""
        changes = sorted([(answer.ended, -1) for answer in self.answers] + [(answer.sent, 1) for answer in self.answers])
        return int(np.cumsum([change for _, change in changes]).max())


def summarize(run: Run, objectives: dict[str, float]) -> dict[str, Any]:
    """Figures of a run, for JSON. `objectives`: limits in milliseconds. None is unknown."""
    done = [answer for answer in run.answers if answer.failure is None]
    tokens, prompt_tokens = total([answer.tokens for answer in done]), total([answer.prompt_tokens for answer in done])
    gaps, lengths = [answer.token_gaps for answer in done], [answer.accept_length for answer in done if answer.accept_length]
    per_token = [answer.seconds_per_token for answer in done]
    chunks = [chunk.tokens for answer in done for chunk in answer.chunks]
    seconds: dict[str, list[float] | None] = {
        "time_to_first_token": [answer.first_token_seconds for answer in done],
        "time_per_output_token": None if tokens is None else [each for each in per_token if each is not None],
        "inter_token_latency": None if None in gaps else [gap for each in gaps if each is not None for gap in each],
        "gap_between_chunks": [gap for answer in done for gap in answer.chunk_gaps],
        "end_to_end_latency": [answer.seconds for answer in done],
    }  # fmt: skip
    spread = {"mean": sum(lengths) / len(lengths), "min": min(lengths), "max": max(lengths)} if lengths else None
    good = sum(is_good(answer, objectives) for answer in done)
    return {
        "summary": {
            "completed": len(done),
            "failed": len(run.answers) - len(done),
            "duration_seconds": run.duration,
            "prompt_tokens": prompt_tokens,
            "output_tokens": tokens,
            "requests_per_second": len(done) / run.duration,
            "output_tokens_per_second": None if tokens is None else tokens / run.duration,
            "good_requests_per_second": None if "tpot" in objectives and tokens is None else good / run.duration,
            "objectives_ms": objectives or None,
            "peak_concurrency": run.peak_concurrency,
        },
        "latency_ms": {name: distribution(values) for name, values in seconds.items()},
        "tokens_per_chunk": None if None in chunks or not chunks else sum(filter(None, chunks)) / len(chunks),
        "accept_length_per_request": spread,
        "failed_requests": dict(Counter(answer.failure.reason for answer in run.answers if answer.failure).most_common()),
    }  # fmt: skip


def distribution(seconds: Sequence[float] | None) -> dict[str, Any] | None:
    """Mean, median and percentiles in milliseconds; None if there are no values."""
    if not seconds:
        return None
    values = 1000 * np.asarray(seconds)
    percentiles = {str(each): float(value) for each, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}
    return {"mean": float(values.mean()), "median": float(np.median(values)), "count": len(values), "percentiles": percentiles}


def is_good(answer: "Answer", objectives: dict[str, float]) -> bool:
    """Whether a request meets every limit. A request with one token has no time per token to exceed."""
    times = {"ttft": answer.first_token_seconds, "tpot": answer.seconds_per_token or 0.0, "e2el": answer.seconds}
    return all(1000 * times[name] <= limit for name, limit in objectives.items())


def total(counts: Sequence[int | None]) -> int | None:
    """The sum; None if a count is unknown."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def notes_of(results: dict[str, Any], run: Run) -> list[str]:
    """What is unknown, and what makes the figures less reliable than they look."""
    found = []
    if results["summary"]["output_tokens"] is None:
        found.append("the server counts no tokens (usage): figures per token are unknown")
    elif results["summary"]["completed"] and results["tokens_per_chunk"] is None:
        found.append("the server counts tokens only at the end: the inter-token latency is unknown")
    if results["load"]["request_rate"] is not None and 1000 * run.worst_lateness > LATE_MS:
        found.append(f"this client fell behind its schedule by up to {1000 * run.worst_lateness:.0f} ms: the load was too low")
    if results["load"]["request_rate"] is not None and 1000 * run.worst_wait > LATE_MS:
        found.append(f"requests waited up to {run.worst_wait:.1f} s for --max-concurrency; no latency includes this")
    if 1000 * run.worst_pause > PAUSE_MS:
        found.append(f"this client paused for up to {1000 * run.worst_pause:.0f} ms: single times may be too long by this")
    return found


# Tables


def tables(results: dict[str, Any]) -> dict[str, str]:
    """`throughput` and `latency`; `speculation` and `failed requests` if there are any."""
    found = {"throughput": throughput_table(results), "latency": latency_table(results["latency_ms"])}
    if results["accept_length"] or results["accept_length_per_request"] or results["tokens_per_chunk"]:
        found["speculation"] = speculation_table(results)
    if results["failed_requests"]:
        rows = [[reason.replace("|", "\\|"), str(count)] for reason, count in results["failed_requests"].items()]
        found["failed requests"] = table(["failed requests", "number"], rows[:10])
    return found


def throughput_table(results: dict[str, Any]) -> str:
    summary, load = results["summary"], results["load"]
    rate, tree = load["request_rate"], results["served"]["server"].get("tree")
    limit = load["max_concurrency"] or "no limit"
    rows = [
        ["model", results["served"]["model"] + (f", tree {tree}" if tree else "")],
        ["load", (f"at most {limit} at once" if rate is None else f"{rate:g} requests/s") + f", {load['num_prompts']} prompts"],
        ["completed, failed requests", f"{summary['completed']}, {summary['failed']}"],
        ["duration, s", figure(summary["duration_seconds"])],
        ["output tokens/s", figure(summary["output_tokens_per_second"], 1)],
        ["requests/s", figure(summary["requests_per_second"])],
    ]
    if summary["objectives_ms"]:
        limits = ", ".join(f"{name} <= {limit:g} ms" for name, limit in summary["objectives_ms"].items())
        rows.append([f"goodput, requests/s with {limits}", figure(summary["good_requests_per_second"])])
    return table(["throughput", ""], rows)


def latency_table(latencies: dict[str, Any]) -> str:
    rows = []
    for key, name in LATENCIES.items():
        values = latencies[key]
        cells = (
            [values["mean"], values["median"], *(values["percentiles"][str(each)] for each in PERCENTILES[1:])] if values else []
        )
        rows.append([name, *(map(figure, cells or [None] * 4))])
    return table(["latency, ms", "mean", "median", *(f"p{each}" for each in PERCENTILES[1:])], rows)


def speculation_table(results: dict[str, Any]) -> str:
    rows = []
    if run := results["accept_length"]:
        rows.append(["accept length, whole run", figure(run["accept_length"]), run["source"]])
        if rates := run.get("acceptance_rate_per_position"):
            rows.append(["drafts accepted, by depth", " ".join(f"{rate:.2f}" for rate in rates), "the same"])
    if each := results["accept_length_per_request"]:
        spread = f"{each['mean']:.2f} ({each['min']:.2f}..{each['max']:.2f})"
        rows.append(["accept length, mean of the requests", spread, "the answers"])
    if results["tokens_per_chunk"]:
        rows.append(["tokens per chunk", figure(results["tokens_per_chunk"]), "the counts in the stream"])
    return table(["speculation", "", "source"], rows)


def figure(value: float | None, digits: int = 2) -> str:
    return "unknown" if value is None else f"{value:.{digits}f}"
