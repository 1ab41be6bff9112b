"""The plots of the tuner, made from its results. Importing this module needs matplotlib."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import BenchmarkError

try:
    import matplotlib
except ImportError:
    raise BenchmarkError("plots need matplotlib: pip install 'jaxspec-llm[bench]'") from None

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 7.0, 3.8
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
LINES = 4
"""The least number of trees that are drawn; every tree that is best at some batch size is."""


def new_figure() -> "Figure":
    """An empty figure, drawn without a display."""
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    return Figure(figsize=(WIDTH, HEIGHT), layout="constrained")


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
    """The plots of a record by name; none of other benchmarks."""
    if record["benchmark"] != "speculative":
        return {}
    return {"trees": draw_trees(record["results"]), "pays": when_it_pays(record["results"])}


def draw_trees(results: dict) -> "Figure":
    """The speed-up of the best trees against the batch size: measured if every tree was, otherwise predicted."""
    measured = all("speed_up" in each for at in results["batches"] for each in at["trees"])
    cells = {
        at["batch"]: {each["tree"]: each["speed_up"]["median"] if measured else each["predicted_speed_up"] for each in at["trees"]}
        for at in sorted(results["batches"], key=lambda at: at["batch"])
    }
    figure = new_figure()
    axis = figure.subplots()
    for tree in interesting(cells):
        axis.plot(list(cells), [at.get(tree, float("nan")) for at in cells.values()], marker="o", markersize=4, label=tree)
    axis.axhline(1, color="black", linewidth=1, linestyle="--", label="plain decoding")
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(cells), list(map(str, cells)))
    axis.set_xlabel("requests at once")
    axis.set_ylabel("speed-up")
    axis.legend(frameon=False, fontsize=8)
    how = "measured end to end" if measured else "predicted from accept length and cycle time, prefill not counted"
    figure.suptitle(f"{how}: speed-up over plain decoding")
    return figure


def interesting(cells: dict[int, dict[str, float]]) -> list[str]:
    """The best tree of every batch size, then the best of the others."""
    score = {tree: sum(at.get(tree, 0.0) for at in cells.values()) for at in cells.values() for tree in at}
    best = [max(at, key=lambda tree: at[tree]) for at in cells.values()]
    everything = list(dict.fromkeys([*best, *sorted(score, key=lambda tree: -score[tree])]))
    return everything[: max(LINES, len(set(best)))]


def when_it_pays(results: dict) -> "Figure":
    """One point per tree: accept length against the cost of a cycle. Above the line a tree is faster than plain decoding."""
    figure = new_figure()
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
