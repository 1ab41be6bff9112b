"""The plots of each benchmark, made from a record's results."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks.acceptance import is_chain
from benchmarks.plots import new_figure
from benchmarks.speculative import picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 7.0, 3.2
"""Inches."""


def figures(record: dict) -> dict[str, "Figure"]:
    """By name; none for a benchmark whose tables say it all."""
    draw = FIGURES.get(record["benchmark"])
    return draw(record["results"]) if draw else {}


def speculative(results: dict) -> dict[str, "Figure"]:
    return {"trees": picture.draw(results)} | ({} if "simulated_accept_lengths" in results else {"pays": when_it_pays(results)})


def when_it_pays(results: dict) -> "Figure":
    """Every tree as a point: what its cycle costs against what it accepts. Above the line it is faster than plain decoding."""
    figure = new_figure(WIDTH, 3.8)
    axis = figure.subplots()
    for at in results["batches"]:
        costs = [each["cost"]["median"] for each in at["trees"]]
        lengths = [results["acceptance"][each["tree"]]["accept_length"] for each in at["trees"]]
        axis.scatter(costs, lengths, s=14, label=f"batch {at['batch']}")
    furthest = max(each["cost"]["median"] for at in results["batches"] for each in at["trees"])
    axis.plot([1, furthest], [1, furthest], color="black", linewidth=1, linestyle="--", label="break-even")
    axis.set_ylim(1, 0.3 + max(each["accept_length"] for each in results["acceptance"].values()))
    axis.set_xlabel("cost of a cycle, in plain steps")
    axis.set_ylabel("accept length")
    axis.set_title("when speculation pays: above the line decoding is faster than plain")
    axis.legend(frameon=False)
    return figure


def throughput(results: dict) -> dict[str, "Figure"]:
    """Tokens per second; tokens per verification; where a cycle's time goes."""
    batches, tree = results["batches"], results["tree"]
    figure = new_figure(10.5, HEIGHT)
    speed, accepted, parts = figure.subplots(1, 3)
    names = [f"batch {each['batch']}" for each in batches]
    for offset, (mode, name) in enumerate((("plain", "plain"), ("speculation", tree))):
        places = [index + 0.4 * offset for index in range(len(batches))]
        speed.bar(places, [each["modes"][mode]["tokens_per_second"]["median"] for each in batches], 0.38, label=name)
    speed.set_xticks([index + 0.2 for index in range(len(batches))], names)
    speed.set_ylabel("tokens/s")
    speed.legend(frameon=False)
    counts = batches[0]["acceptance"]["verifications_by_tokens"]
    accepted.bar(list(counts), [count / sum(counts.values()) for count in counts.values()], color="tab:green")
    accepted.set_xlabel("tokens of a verification")
    accepted.set_title(f"accept length {batches[0]['acceptance']['accept_length']:.2f}")
    bottoms = [0.0] * len(batches)
    for part in batches[0]["parts_ms"]["speculation"]:
        times = [each["parts_ms"]["speculation"][part]["median"] for each in batches]
        parts.bar(names, times, 0.6, bottom=bottoms, label=part)
        bottoms = [bottom + time for bottom, time in zip(bottoms, times, strict=True)]
    parts.set_ylabel("ms per cycle")
    parts.legend(frameon=False, fontsize=7)
    return {"throughput": figure}


def acceptance(results: dict) -> dict[str, "Figure"]:
    """Chains against the best trees by node count; acceptance by depth of the best tree per node count."""
    figure = new_figure(9.0, HEIGHT)
    lengths, depths = figure.subplots(1, 2)
    counts = sorted({each["nodes"] for each in results["trees"]})
    for label, is_wanted in (("chain", True), ("best tree", False)):
        best = [
            max((each for each in results["trees"] if each["nodes"] == count and is_chain(each) is is_wanted),
                key=lambda each: each["accept_length"], default=None)
            for count in counts
        ]  # fmt: skip
        found = [(count, each) for count, each in zip(counts, best, strict=True) if each is not None]
        lengths.plot([count for count, _ in found], [each["accept_length"] for _, each in found], marker="o", label=label)
        if not is_wanted:
            for _, each in found:
                depths.plot(range(1, len(each["accepted_at_depth"]) + 1), each["accepted_at_depth"], marker="o", label=each["tree"])
    lengths.set_xscale("log", base=2)
    lengths.set_xticks(counts, [str(count) for count in counts])
    lengths.set_xlabel("nodes verified")
    lengths.set_ylabel("accept length")
    lengths.legend(frameon=False)
    depths.set_xlabel("depth")
    depths.set_ylabel("drafts accepted")
    depths.set_ylim(0, 1)
    depths.legend(frameon=False)
    return {"acceptance": figure}


def under_load(results: dict) -> dict[str, "Figure"]:
    """Speculation off, on and adaptive against the batch size."""
    if "batches" not in results:
        return {}
    figure = new_figure(WIDTH, HEIGHT)
    axis = figure.subplots()
    batches = [each["batch"] for each in results["batches"]]
    for mode in ("off", "on", "adaptive"):
        axis.plot(batches, [each["tokens_per_second"][mode]["median"] for each in results["batches"]], marker="o", label=mode)
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.set_xlabel("requests at once")
    axis.set_ylabel("tokens/s")
    axis.legend(frameon=False, title="speculation")
    return {"batches": figure}


FIGURES: dict[str, Callable[[dict], dict[str, "Figure"]]] = {
    "speculative": speculative,
    "throughput": throughput,
    "acceptance": acceptance,
    "under_load": under_load,
}
