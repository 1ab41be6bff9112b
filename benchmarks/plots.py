"""The plots of each benchmark, made from its results. Importing this module needs matplotlib."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import BenchmarkError

try:
    import matplotlib
except ImportError:
    raise BenchmarkError("plots need matplotlib: pip install 'jaxspec-llm[bench]'") from None

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 7.0, 3.2
"""Inches."""
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "figure.facecolor": "white",
    "svg.fonttype": "none",  # keep text as text: small files, searchable words
    "svg.hashsalt": "jaxspec",  # the same figure gives the same file
}


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of this size in inches, drawn without a display."""
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: "Figure", path: Path) -> None:
    """Writes the figure; the suffix of the path says how: .svg, .png or .pdf."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def svg_text(figure: "Figure") -> str:
    """The figure as an <svg> element for a page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def figures(record: dict) -> dict[str, "Figure"]:
    """The plots of a record by name; none for benchmarks without plots."""
    draw = FIGURES.get(record["benchmark"])
    return draw(record["results"]) if draw else {}


# The tuner

LINES = 4
"""The least number of trees in the line plot; every tree that is best at some batch size is shown."""
KINDS = {
    "speed_up": "measured end to end:",
    "predicted_speed_up": "predicted from accept length and cycle time, prefill not counted:",
    "simulated_speed_up": "SIMULATED",
}


def draw_trees(results: dict) -> "Figure":
    """A heat map of all trees per batch size, and the speed-up of the best trees against the batch size."""
    batches = results["batches"]
    kind = shown_kind(results)
    cells = {at["batch"]: {each["tree"]: value(each, kind) for each in at["trees"]} for at in batches}
    shapes = sorted({shape(tree) for at in cells.values() for tree in at})
    steps = sorted({int(tree.split("/")[0]) for at in cells.values() for tree in at})
    figure = new_figure(2.2 + 1.9 * len(batches) + 3.2, max(2.6, 0.24 * len(shapes) + 1.2))
    axes: Any = figure.subplots(1, len(batches) + 1, width_ratios=[*[1.9] * len(batches), 3.2])
    known = [number for at in cells.values() for number in at.values() if number is not None]
    furthest = max([abs(number - 1) for number in known], default=0.1) or 0.1
    for axis, at in zip(axes[:-1], batches, strict=True):
        heat(axis, cells[at["batch"]], steps, shapes, furthest)
        axis.set_title(f"batch {at['batch']}")
        axis.set_xlabel("steps")
        mark(axis, at.get("choice"), steps, shapes)
        if axis is not axes[0]:
            axis.set_yticklabels([])
    axes[0].set_ylabel("topk / nodes")
    lines(axes[-1], cells)
    figure.suptitle(f"{KINDS[kind]} speed-up over plain decoding{assumed(results)}")
    return figure


def shown_kind(results: dict) -> str:
    """The kind of speed-up that the whole picture shows: measured if every tree was measured, otherwise predicted."""
    if "simulated_accept_lengths" in results:
        return "simulated_speed_up"
    return "speed_up" if all("speed_up" in each for at in results["batches"] for each in at["trees"]) else "predicted_speed_up"


def assumed(results: dict) -> str:
    lengths = results.get("simulated_accept_lengths")
    return f", if the accept length were {lengths[-1]:g}" if lengths else ""


def value(each: dict, kind: str) -> float | None:
    """The speed-up of a tree; a simulated one is that of the largest accept length."""
    if kind == "simulated_speed_up":
        return list(each[kind].values())[-1]
    return each[kind]["median"] if kind == "speed_up" else each[kind]


def shape(tree: str) -> tuple[int, ...]:
    """topk, nodes and, if they are limited, the levels of the head; all chains share one row."""
    _, topk, nodes, *of_head = map(int, tree.split("/"))
    return topk, 0 if topk == 1 else nodes, *of_head


def heat(axis: "Axes", cells: dict[str, float | None], steps: list[int], shapes: list[tuple[int, ...]], furthest: float) -> None:
    """Steps across, topk/nodes down; yellow is as fast as plain decoding, green is faster."""
    grid = [[float("nan")] * len(steps) for _ in shapes]
    for tree, number in cells.items():
        row, column = shapes.index(shape(tree)), steps.index(int(tree.split("/")[0]))
        if number is not None:
            grid[row][column] = number
            axis.text(column, row, f"{number:.2f}", ha="center", va="center", fontsize=7)
    axis.imshow(grid, cmap="RdYlGn", vmin=1 - furthest, vmax=1 + furthest, aspect="auto")
    axis.set_xticks(range(len(steps)), [str(step) for step in steps])
    axis.set_yticks(range(len(shapes)), ["/".join(map(str, ("chain", *each[2:]) if each[0] == 1 else each)) for each in shapes])
    axis.tick_params(length=0)


def mark(axis: "Axes", tree: str | None, steps: list[int], shapes: list[tuple[int, ...]]) -> None:
    """A frame around the choice."""
    if tree is None or tree == "plain":
        return
    from matplotlib.patches import Rectangle

    row, column = shapes.index(shape(tree)), steps.index(int(tree.split("/")[0]))
    axis.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, linewidth=2))


def lines(axis: "Axes", cells: dict[int, dict[str, float | None]]) -> None:
    """Speed-up against batch size."""
    batches = sorted(cells)
    for tree in interesting(cells):
        axis.plot(batches, [cells[batch].get(tree) or float("nan") for batch in batches], marker="o", markersize=4, label=tree)
    axis.axhline(1, color="black", linewidth=1, linestyle="--", label="plain decoding")
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.set_xlabel("requests at once")
    axis.set_ylabel("speed-up")
    axis.legend(frameon=False, fontsize=8)


def interesting(cells: dict[int, dict[str, float | None]]) -> list[str]:
    """The best tree of every batch size, then the best of the others."""
    score = {tree: sum(at.get(tree) or 0 for at in cells.values()) for at in cells.values() for tree in at}
    best = [max(at, key=lambda tree: at[tree] or 0) for at in cells.values()]
    everything = list(dict.fromkeys([*best, *sorted(score, key=lambda tree: -score[tree])]))
    return everything[: max(LINES, len(set(best)))]


# By benchmark


def is_chain(each: dict) -> bool:
    return each["tree"].split("/")[1] == "1"


def speculative(results: dict) -> dict[str, "Figure"]:
    return {"trees": draw_trees(results)} | ({} if "simulated_accept_lengths" in results else {"pays": when_it_pays(results)})


def when_it_pays(results: dict) -> "Figure":
    """One point per tree: accept length against the cost of a cycle. Above the line a tree is faster than plain decoding."""
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
    axis.set_title("above the line speculation is faster than plain decoding")
    axis.legend(frameon=False)
    return figure


def throughput(results: dict) -> dict[str, "Figure"]:
    """Tokens per second, tokens per verification, and the parts of a cycle."""
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
    """Chains against the best trees by node count, and acceptance by depth of those trees."""
    trees, *others = results["temperatures"].values()
    figure = new_figure(9.0, HEIGHT)
    lengths, depths = figure.subplots(1, 2)
    counts = sorted({each["nodes"] for each in trees})
    for label, chains in (("chain", True), ("best tree", False)):
        best = [
            max((each for each in trees if each["nodes"] == count and is_chain(each) is chains),
                key=lambda each: each["accept_length"], default=None)
            for count in counts
        ]  # fmt: skip
        found = [(count, each) for count, each in zip(counts, best, strict=True) if each is not None]
        lengths.plot([count for count, _ in found], [each["accept_length"] for _, each in found], marker="o", label=label)
        if not chains:
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
    return {"acceptance": figure} | ({"temperatures": by_temperature(results["temperatures"])} if others else {})


def by_temperature(temperatures: dict[str, list[dict]]) -> "Figure":
    """Accept length of each tree against the temperature."""
    figure = new_figure(WIDTH, HEIGHT)
    axis = figure.subplots()
    for number, tree in enumerate(each["tree"] for each in next(iter(temperatures.values()))):
        lengths = [found[number]["accept_length"] for found in temperatures.values()]
        axis.plot(list(map(float, temperatures)), lengths, marker="o", label=tree)
    axis.set_xlabel("temperature")
    axis.set_ylabel("accept length")
    axis.set_ylim(bottom=1)
    axis.legend(frameon=False)
    return figure


FIGURES: dict[str, Callable[[dict], dict[str, "Figure"]]] = {
    "speculative": speculative,
    "throughput": throughput,
    "acceptance": acceptance,
}
