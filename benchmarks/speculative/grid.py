"""Which trees a sweep tries: every combination of steps, topk and nodes that makes sense, and why the others don't."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxspec.config import SpecConfig


@dataclass(frozen=True)
class Grid:
    """The trees of a sweep, without plain decoding, which every sweep has beside them."""

    trees: list[SpecConfig]
    skipped: dict[str, str]
    """Combinations that are not tried, as steps/topk/nodes, and why."""


def grid(steps: Sequence[int], topks: Sequence[int], nodes: Sequence[int]) -> Grid:
    """All trees of these sizes. Zeros stand for plain decoding, as in SGLang's sweep, and give no tree.

    In:  steps [0, 2], topks [1, 2], nodes [4, 16]
    Out: trees 2/1/3, 2/2/4; skipped 2/2/16 (more nodes than 1 + topk + (steps - 1) * topk^2 = 7)
    """
    trees, skipped = list[SpecConfig](), dict[str, str]()
    for step in filter(None, sorted(set(steps))):
        for topk in filter(None, sorted(set(topks))):
            for count in sorted(set(nodes)) if topk > 1 else [step + 1]:  # a chain has one size
                reason = why_not(step, topk, count)
                if reason is None:
                    trees.append(SpecConfig(step, topk, count))
                elif count:
                    skipped[f"{step}/{topk}/{count}"] = reason
    return Grid(trees, skipped)


def why_not(step: int, topk: int, count: int) -> str | None:
    """Why there is no such tree, or no use for it; None: there is."""
    available = 1 + topk + (step - 1) * topk**2
    if count > available:
        return f"more nodes than 1 + topk + (steps - 1) * topk^2 = {available} that are drafted"
    if count <= step:
        return f"{count} nodes can't hold a path of {step} drafts below the root: fewer steps draft the same"
    return None


def dominated(accept_lengths: dict[SpecConfig, float], tolerance: float = 0.005) -> dict[SpecConfig, SpecConfig]:
    """Trees that need not be timed, and for each the one because of which.

    A tree that is no larger in any of the three numbers is taken to cost no more at any batch size; if it also accepts as much (up
    to `tolerance`, a share), the larger one can hardly win. Only trees that are kept drop others, so tolerances don't add up.
    """
    kept, beaten = list[SpecConfig](), dict[SpecConfig, SpecConfig]()
    for tree in sorted(accept_lengths, key=size):
        enough = accept_lengths[tree] * (1 - tolerance)
        other = next((each for each in kept if accept_lengths[each] >= enough and fits_into(each, tree)), None)
        if other is None:
            kept.append(tree)
        else:
            beaten[tree] = other
    return beaten


def fits_into(tree: SpecConfig, other: SpecConfig) -> bool:
    """Whether it is no larger in any of the three numbers."""
    return all(mine <= its for mine, its in zip(size(tree), size(other), strict=True))


def size(tree: SpecConfig) -> tuple[int, int, int]:
    return tree.num_steps, tree.topk, tree.num_draft_tokens
