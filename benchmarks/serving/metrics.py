"""Figures of a run, from its answers. Latencies are milliseconds; None is what the server gave no means to know."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from .answers import Answer
from .load import Run


def summarize(run: Run, percentiles: Sequence[float], objectives: dict[str, float]) -> dict[str, Any]:
    """What is recorded about a run but for its settings. `objectives`: most milliseconds, by vLLM's names (ttft, tpot, e2el)."""
    done = [answer for answer in run.answers if answer.failure is None]
    tokens, prompt_tokens = total([answer.tokens for answer in done]), total([answer.prompt_tokens for answer in done])
    both = None if tokens is None or prompt_tokens is None else tokens + prompt_tokens
    good = count_good(done, objectives) if objectives else None

    def per_second(amount: float | None) -> float | None:
        return None if amount is None else amount / run.duration

    return {
        "summary": {
            "completed": len(done),
            "failed": len(run.answers) - len(done),
            "duration_seconds": run.duration,
            "prompt_tokens": prompt_tokens,
            "output_tokens": tokens,
            "requests_per_second": per_second(len(done)),
            "output_tokens_per_second": per_second(tokens),
            "total_tokens_per_second": per_second(both),
            "good_requests_per_second": per_second(good),
            "objectives_ms": objectives or None,
            "peak_concurrency": run.peak_concurrency,
        },
        "latency_ms": {name: distribution(values, percentiles) for name, values in latencies(done).items()},
        "tokens_per_chunk": tokens_per_chunk(done),
        "accept_length_per_request": accept_lengths(done),
        "failed_requests": dict(Counter(answer.failure.reason for answer in run.answers if answer.failure).most_common()),
        "client": {
            "worst_lateness_ms": 1000 * run.worst_lateness,
            "worst_wait_for_a_slot_ms": 1000 * run.worst_wait,
            "worst_pause_ms": 1000 * run.worst_pause,
        },
    }


def latencies(done: Sequence[Answer]) -> dict[str, list[float] | None]:
    """Milliseconds of every request, token or chunk; None if one of them is unknown, since the others would not be typical."""
    is_stream = all(answer.is_stream for answer in done)
    has_counts = all(answer.tokens is not None for answer in done)
    gaps = [answer.token_gaps for answer in done]
    first = [answer.first_token_seconds for answer in done]
    per_token = [answer.seconds_per_token for answer in done]
    seconds: dict[str, list[float] | None] = {
        "time_to_first_token": [each for each in first if each is not None] if is_stream else None,
        "time_per_output_token": [each for each in per_token if each is not None] if is_stream and has_counts else None,
        "inter_token_latency": None if None in gaps else [gap for each in gaps if each is not None for gap in each],
        "gap_between_chunks": [gap for answer in done for gap in answer.chunk_gaps] if is_stream else None,
        "end_to_end_latency": [answer.seconds for answer in done],
    }
    return {name: None if values is None else [1000 * value for value in values] for name, values in seconds.items()}


def distribution(values: Sequence[float] | None, percentiles: Sequence[float]) -> dict[str, Any] | None:
    """None if there are no values. Percentiles lie between the two nearest values, as numpy's do.

    In:  [1, 2, 3, 4], [50, 90]
    Out: {"mean": 2.5, "median": 2.5, "std": 1.12, "min": 1, "max": 4, "count": 4, "percentiles": {"50": 2.5, "90": 3.7}}
    """
    if not values:
        return None
    found = np.percentile(values, percentiles)
    return {
        "mean": float(np.mean(values)),
        "median": float(np.median(values)),
        "std": float(np.std(values)),
        "min": float(min(values)),
        "max": float(max(values)),
        "count": len(values),
        "percentiles": {f"{each:g}": float(value) for each, value in zip(percentiles, found, strict=True)},
    }


def count_good(done: Sequence[Answer], objectives: dict[str, float]) -> int | None:
    """Requests that meet every objective; None if that is unknown. Without a second token there is no time per token to miss."""
    if "ttft" in objectives and not all(answer.is_stream for answer in done):
        return None
    if "tpot" in objectives and not all(answer.is_stream and answer.tokens is not None for answer in done):
        return None
    return sum(
        all(1000 * value <= objectives[name] for name, value in judged(answer).items() if name in objectives) for answer in done
    )


def judged(answer: Answer) -> dict[str, float]:
    """The times, in seconds, that objectives are about."""
    return {"ttft": answer.first_token_seconds or 0.0, "tpot": answer.seconds_per_token or 0.0, "e2el": answer.seconds}


def tokens_per_chunk(done: Sequence[Answer]) -> float | None:
    """Mean over all chunks; None if a server does not tell it."""
    counts = [chunk.tokens for answer in done if answer.is_stream for chunk in answer.chunks]
    known = [each for each in counts if each is not None]
    return sum(known) / len(known) if known and len(known) == len(counts) else None


def accept_lengths(done: Sequence[Answer]) -> dict[str, Any] | None:
    """Of the requests whose answer tells it."""
    lengths = [answer.accept_length for answer in done if answer.accept_length is not None]
    if not lengths:
        return None
    sources = sorted({answer.accept_length_source for answer in done if answer.accept_length_source})
    return {
        "mean": sum(lengths) / len(lengths),
        "median": float(np.median(lengths)),
        "min": min(lengths),
        "max": max(lengths),
        "requests": len(lengths),
        "source": ", ".join(sources),
    }


def total(counts: Sequence[int | None]) -> int | None:
    """None if one of them is."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def details(run: Run) -> list[dict[str, Any]]:
    """Every request, for --output-details. Times are milliseconds, counted from the first request; there is no text."""
    started = min(answer.sent for answer in run.answers)

    def milliseconds(seconds: float | None) -> float | None:
        return None if seconds is None else round(1000 * seconds, 3)

    return [
        {
            "sent_ms": milliseconds(answer.sent - started),
            "ttft_ms": milliseconds(answer.first_token_seconds),
            "tpot_ms": milliseconds(answer.seconds_per_token),
            "e2el_ms": milliseconds(answer.seconds) if answer.chunks else None,
            "chunk_gaps_ms": [milliseconds(gap) for gap in answer.chunk_gaps],
            "chunk_tokens": [chunk.tokens for chunk in answer.chunks],
            "prompt_tokens": answer.prompt_tokens,
            "output_tokens": answer.tokens,
            "accept_length": answer.accept_length,
            "failure": None if answer.failure is None else answer.failure.reason,
        }
        for answer in run.answers
    ]
