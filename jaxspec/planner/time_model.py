"""A model of a cycle's time on a GPU: what is copied, and what each launch costs. It forecasts; nothing in it was measured by us.

It is here so that a measurement can be held against it, part by part. The constants are assumptions of a review of the GPU program
(November 2026). None of them is fitted to jaxspec, which had not run on a GPU yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxspec.config import TreeShape
from jaxspec.planner.compile import CompiledCycle, Launch
from jaxspec.planner.estimate import CycleCost, Pair, cycle_cost
from jaxspec.planner.gpus import Gpu

COPY_SHARE = 0.896
"""Copying large arrays, as a share of the data sheet's bandwidth: 4.3 of 4.8 TB/s on an H200, 3.0 of 3.35 TB/s on an H100."""
PRODUCT_SHARE = 0.93
"""Matrix products of a few rows, as a share of the speed of copies, with tile sizes that were tuned on the device."""
LAUNCH = 2.0e-6
"""Seconds that a small kernel takes if it waits for the one before it, in a CUDA graph; also the ramp and tail of a large one."""
ATTENTION = 6.0e-6
"""Seconds that attention's first kernel takes beside reading the cache: each block walks its keys one after the other."""


@dataclass(frozen=True)
class LaunchCounts:
    """Launches of a greedy cycle. The defaults are those of Llama-3.1-8B with an EAGLE-3 head, 7/1/8, batch 1 (24 November
    2026). With 5/4/8 a level takes 26 and the tree 19.
    """

    products: float = 4
    """Per layer of the target, as the next four."""
    attention: float = 2
    norms: float = 2
    """Norms and the additions before them."""
    rotations: float = 1
    sums: float = 1
    """Everything else: SwiGLU, and what XLA adds."""
    level: float = 20
    """Per level of the tree after the first: the head on one beam, and the next beam."""
    extension: float = 20
    """The head over the emitted tokens."""
    tree: float = 3
    """Choosing the best candidates and walking down the tree; plain cycles have none of these three."""
    other: float = 31
    """Rows of the state, sampling, the budget, writing the keys."""

    @property
    def layer(self) -> float:
        """Launches per layer of the target."""
        return self.products + self.attention + self.norms + self.rotations + self.sums


def counts_of(compiled: CompiledCycle, tree: TreeShape) -> LaunchCounts:
    """The counts of a compiled cycle. What its tree lacks, such as levels, stays the default's."""
    launches = compiled.greedy_launches
    in_layers = [launch for launch in launches if launch.stage == "verify" and launch.layer is not None]
    kinds = [kind_of(launch) for launch in in_layers if launch.layer == 1]  # the first layer has some that run once
    found = LaunchCounts(**{kind: kinds.count(kind) for kind in ("products", "attention", "norms", "rotations", "sums")})
    num_layers = len({launch.layer for launch in in_layers})
    rest = len(launches) - num_layers * len(kinds) - 2  # the last norm and the output projection are counted by the model
    if tree.num_steps == 0:
        return replace(found, other=rest)
    stages = compiled.stages
    extension, ranking = stages.get("extend", 0), stages.get("build_tree", 0) + stages.get("accept", 0)
    found, rest = replace(found, extension=extension, tree=ranking), rest - extension - ranking
    if tree.num_steps == 1:
        return replace(found, other=rest)
    drafting = stages.get("draft", 0)
    return replace(found, level=drafting / (tree.num_steps - 1), other=rest - drafting)


def kind_of(launch: Launch) -> str:
    """The part of a layer that a launch belongs to, by its kernel's name."""
    for part, kind in {
        "gemm": "products",
        "matmul": "products",
        "tree_attention": "attention",
        "norm": "norms",
        "rotate_qkv": "rotations",
    }.items():
        if part in launch.kernel:
            return kind
    return "products" if launch.kind in ("kGemm", "kCublasLtMatmul") else "sums"


def time_model(
    models: Pair,
    tree: TreeShape,
    batch: int,
    context: int,
    gpu: Gpu,
    counts: LaunchCounts | None = None,
    copy_speed: float | None = None,
) -> dict[str, float]:
    """The parts of a greedy cycle's time in milliseconds, in the order of their names below; their sum is the cycle's.

    Args:
        models: Target and head. Several GPUs are not modelled: their traffic is left out.
        tree: The tree; plain decoding needs no head.
        batch: Requests. The model is meant for a few rows: large products are taken to reach the data sheet's peak.
        context: Committed tokens of each request.
        gpu: Its bandwidth is the data sheet's.
        counts: Launches; None: the defaults of LaunchCounts.
        copy_speed: Bytes per second of a copy measured on the device; None: COPY_SHARE of the bandwidth.

    Raises ValueError if the tree needs a head and there is none.
    """
    counts, copy = counts or LaunchCounts(), copy_speed or COPY_SHARE * gpu.bandwidth
    cost = cycle_cost(models, tree, batch, context)
    moved, layers = cost.moved, models.target.config.num_layers
    weights = product_seconds(moved["target weights"], cost, gpu, copy)
    parts = {
        "target: weights": weights,
        "target: ramp and tail of products": LAUNCH * (layers * counts.products + 1),
        "target: attention": layers * attention_seconds(counts.attention) + moved["target cache"] / copy,
        "target: norms": LAUNCH * (layers * counts.norms + 1),
        "target: rotation": LAUNCH * layers * counts.rotations,
        "target: sums and SwiGLU": LAUNCH * layers * counts.sums,
    }
    if tree.num_steps:
        forwards = tree.num_steps * models.head.config.num_layers if models.head else 0
        extra = attention_seconds(counts.attention) - LAUNCH * counts.attention  # the launches are counted with the others
        parts |= {
            "head: weights": product_seconds(moved["head weights"] + moved["head logits' weights"], cost, gpu, copy),
            "head: attention": forwards * extra + moved["head cache"] / copy,
            "head: launches of the levels": LAUNCH * counts.level * (tree.num_steps - 1),
            "head: launches of the extension": LAUNCH * counts.extension,
            "tree": LAUNCH * counts.tree,
        }
    parts["logits, written and read"] = moved["logits"] / copy
    parts["sampling, state, conditionals"] = LAUNCH * counts.other
    return {name: 1e3 * seconds for name, seconds in parts.items()}


def attention_seconds(launches: float) -> float:
    """One attention without reading the cache: the first kernel, and merging if there is a second."""
    return ATTENTION + LAUNCH * (launches - 1)


def product_seconds(moved: float, cost: CycleCost, gpu: Gpu, copy: float) -> float:
    """Matrix products: reading their weights, or multiplying where that takes longer, in proportion to the weights."""
    matrices = sum(size for name, size in cost.moved.items() if "weights" in name)
    return max(moved / (PRODUCT_SHARE * copy), cost.operations / gpu.arithmetic * moved / matrices)


def constants(gpu: Gpu, copy_speed: float | None = None) -> Mapping[str, float]:
    """What the model assumes, with units in the names."""
    return {
        "copy_bytes_per_second": copy_speed or COPY_SHARE * gpu.bandwidth,
        "products_share_of_copy_speed": PRODUCT_SHARE,
        "seconds_per_launch": LAUNCH,
        "seconds_of_attention_without_its_cache": attention_seconds(LaunchCounts.attention),
    }
