"""A sweep as a picture: a heat map of all trees per batch size, and the speed-up of the best trees against the batch size."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.options import show
from benchmarks.plots import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES = 4
"""Trees that the lines show: all that are best somewhere, and so many at least."""
KINDS = {
    "speed_up": "measured end to end:",
    "predicted_speed_up": "predicted from accept length and cycle time, prefills not counted:",
    "simulated_speed_up": "SIMULATED",
}


def save(results: dict, path: Path) -> None:
    """Draws and writes the picture, and says where."""
    save_figure(draw(results), path)
    print(f"picture: {show(path)}")


def draw(results: dict) -> "Figure":
    """One panel per batch size and one with the lines."""
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
    """One kind of speed-up for the whole picture: measured if every tree was, else predicted; they are not alike."""
    if "simulated_accept_lengths" in results:
        return "simulated_speed_up"
    return "speed_up" if all("speed_up" in each for at in results["batches"] for each in at["trees"]) else "predicted_speed_up"


def assumed(results: dict) -> str:
    lengths = results.get("simulated_accept_lengths")
    return f", if the accept length were {lengths[-1]:g}" if lengths else ""


def value(each: dict, kind: str) -> float | None:
    """Of a tree; simulated: with the largest accept length."""
    if kind == "simulated_speed_up":
        return list(each[kind].values())[-1]
    return each[kind]["median"] if kind == "speed_up" else each[kind]


def shape(tree: str) -> tuple[int, int]:
    """topk and nodes; all chains are one row, whatever their length."""
    _, topk, nodes = map(int, tree.split("/"))
    return topk, 0 if topk == 1 else nodes


def heat(axis: "Axes", cells: dict[str, float | None], steps: list[int], shapes: list[tuple[int, int]], furthest: float) -> None:
    """Steps across, topk/nodes down; yellow is plain decoding's speed, green is faster."""
    grid = [[float("nan")] * len(steps) for _ in shapes]
    for tree, number in cells.items():
        row, column = shapes.index(shape(tree)), steps.index(int(tree.split("/")[0]))
        if number is not None:
            grid[row][column] = number
            axis.text(column, row, f"{number:.2f}", ha="center", va="center", fontsize=7)
    axis.imshow(grid, cmap="RdYlGn", vmin=1 - furthest, vmax=1 + furthest, aspect="auto")
    axis.set_xticks(range(len(steps)), [str(step) for step in steps])
    axis.set_yticks(range(len(shapes)), ["chain" if topk == 1 else f"{topk}/{nodes}" for topk, nodes in shapes])
    axis.tick_params(length=0)


def mark(axis: "Axes", tree: str | None, steps: list[int], shapes: list[tuple[int, int]]) -> None:
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
    """The best tree of every batch size, then others that do well everywhere."""
    score = {tree: sum(at.get(tree) or 0 for at in cells.values()) for at in cells.values() for tree in at}
    best = [max(at, key=lambda tree: at[tree] or 0) for at in cells.values()]
    everything = list(dict.fromkeys([*best, *sorted(score, key=lambda tree: -score[tree])]))
    return everything[: max(LINES, len(set(best)))]
