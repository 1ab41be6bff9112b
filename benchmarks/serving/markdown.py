"""Tables of a run, from its results alone."""

from typing import Any

from jaxspec.commands.common import table

LATENCIES = {
    "time_to_first_token": "time to first token (TTFT)",
    "time_per_output_token": "time per output token (TPOT)",
    "inter_token_latency": "inter-token latency, per token",
    "gap_between_chunks": "gap between chunks",
    "end_to_end_latency": "end-to-end latency",
}
MOST_REASONS = 10


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Markdown by name: load, throughput, latency, and where there is something to show speculation and failed requests."""
    found = {
        "load": load_table(results),
        "throughput": throughput_table(results["summary"]),
        "latency": latency_table(results["latency_ms"]),
    }
    if results["accept_length"] or results["accept_length_per_request"] or results["tokens_per_chunk"]:
        found["speculation"] = speculation_table(results)
    if results["failed_requests"]:
        found["failed requests"] = failure_table(results["failed_requests"])
    return found


def load_table(results: dict[str, Any]) -> str:
    """What was sent to whom."""
    served, load = results["served"], results["load"]
    rate = (
        "all at once" if load["request_rate"] is None else f"{load['request_rate']:g} requests/s, burstiness {load['burstiness']:g}"
    )
    tree = served["server"].get("tree")
    return table(["load", ""], [
        ["model", served["model"] + (f", tree {tree}" if tree else "")],
        ["protocol", served["backend"] + ("" if load["stream"] else ", answers in one piece")],
        ["prompts", f"{load['num_prompts']} of {load['dataset']}"],
        ["arrivals", rate],
        ["most at once", str(load["max_concurrency"] or "no limit")],
    ])  # fmt: skip


def throughput_table(summary: dict[str, Any]) -> str:
    rows = [
        ["completed requests", str(summary["completed"])],
        ["failed requests", str(summary["failed"])],
        ["duration, s", figure(summary["duration_seconds"])],
        ["prompt tokens", figure(summary["prompt_tokens"], 0)],
        ["output tokens", figure(summary["output_tokens"], 0)],
        ["requests/s", figure(summary["requests_per_second"])],
    ]
    if summary["objectives_ms"]:
        limits = ", ".join(f"{name} <= {limit:g} ms" for name, limit in summary["objectives_ms"].items())
        rows.append([f"goodput, requests/s with {limits}", figure(summary["good_requests_per_second"])])
    return table(["throughput", ""], [
        *rows,
        ["output tokens/s", figure(summary["output_tokens_per_second"], 1)],
        ["total tokens/s", figure(summary["total_tokens_per_second"], 1)],
        ["peak concurrency", str(summary["peak_concurrency"])],
    ])  # fmt: skip


def latency_table(latencies: dict[str, Any]) -> str:
    names = next((list(each["percentiles"]) for each in latencies.values() if each), [])
    names = [name for name in names if name != "50"]  # that is the median
    rows = []
    for key, name in LATENCIES.items():
        values = latencies[key]
        cells = [values["mean"], values["median"], *(values["percentiles"][each] for each in names)] if values else []
        rows.append([name, *(figure(each) for each in cells or [None] * (2 + len(names)))])
    return table(["latency, ms", "mean", "median", *(f"p{name}" for name in names)], rows)


def speculation_table(results: dict[str, Any]) -> str:
    """Accept lengths, each with its source."""
    rows = []
    if of_run := results["accept_length"]:
        rows.append(["accept length, whole run", figure(of_run["accept_length"]), of_run["source"]])
        if of_run.get("acceptance_rate_per_position"):
            rates = " ".join(f"{rate:.2f}" for rate in of_run["acceptance_rate_per_position"])
            rows.append(["drafts accepted, by depth", rates, "the same"])
    if each := results["accept_length_per_request"]:
        spread = f"{each['mean']:.2f} ({each['min']:.2f}..{each['max']:.2f})"
        rows.append([f"accept length, mean of {each['requests']} requests", spread, each["source"]])
    if results["tokens_per_chunk"]:
        rows.append(["tokens per chunk", figure(results["tokens_per_chunk"]), "the stream's counts"])
    return table(["speculation", "", "source"], rows)


def failure_table(reasons: dict[str, int]) -> str:
    """The most frequent reasons."""
    ordered = sorted(reasons.items(), key=lambda each: -each[1])
    rows = [[reason.replace("|", "\\|"), str(count)] for reason, count in ordered[:MOST_REASONS]]
    if others := ordered[MOST_REASONS:]:
        rows.append([f"{len(others)} other reasons", str(sum(count for _, count in others))])
    return table(["failed requests", "requests"], rows)


def figure(value: float | None, digits: int = 2) -> str:
    return "unknown" if value is None else f"{value:.{digits}f}"
