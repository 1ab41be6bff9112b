"""A model of a cycle's time on a GPU: what is copied, what each launch costs, and what sampling computes.

It is here so that a measurement can be held against it, part by part. The constants are assumptions of a review of the GPU program
(November 2026), made before jaxspec ran on a GPU; none is fitted to it. The first measurement, on an H200 with 16-bit weights at
batch 1, took 0.96 to 1.03 of the greedy forecast and 0.97 to 1.09 of the filtered one; with int8 weights 1.1 to 1.2
(docs/performance.md).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxspec.models.head import HeadConfig
from jaxspec.planner.compile import KINDS, CompiledCycle, Launch
from jaxspec.planner.estimate import CycleCost, Pair, cycle_cost
from jaxspec.planner.gpus import Gpu
from jaxspec.tree_shape import TreeShape

COPY_SHARE = 0.896
"""Copying large arrays, as a share of the data sheet's bandwidth: 4.3 of 4.8 TB/s on an H200, 3.0 of 3.35 TB/s on an H100."""
PRODUCT_SHARE = 0.93
"""Matrix products of a few rows, as a share of the speed of copies, with tile sizes that were tuned on the device."""
LAUNCH = 2.0e-6
"""Seconds that a small kernel takes if it waits for the one before it, in a CUDA graph; also the ramp and tail of a large one."""
ATTENTION = 6.0e-6
"""Seconds that attention's first kernel takes beside reading the cache: each block walks its keys one after the other."""
HOST_LAUNCH = 5.0e-6
"""Seconds per launch if the host makes each, because the driver forms no CUDA graph."""
INSTRUCTIONS_SHARE = 1 / 30
"""Instructions per second on numbers of 32 bits, as a share of the tensor cores' operations: 33 of 989 T/s on an H100, 10 of 312 on
an A100."""
NOISE_INSTRUCTIONS = 150
"""For the noise of one token: 20 rounds of Threefry and two logarithms."""
EXCHANGE, EXCHANGE_OF_MACHINES = 10e-6, 30e-6
"""Seconds of a sum or a gathering between the GPUs of one machine and of several, however few bytes: NCCL's latency, 8 to 15 µs
over NVLink."""
LINK = 450e9
"""Bytes per second that a GPU gets from others of its machine: NVLink of an H100, in one direction."""
CLOCK, CORES = 1.98e9, 132
"""Hertz and multiprocessors of an H100 and an H200. Others are slower: an A100 has 1.41e9 and 108."""
CUTOFF_CYCLES, CUTOFF_SEARCH, ROUGH_SEARCH = 0.5, 30_000, 6_000
"""Clock cycles of the cut-off's last launch, which has a thread block per row, by counting instructions and waits for memory: for
each token that it reads, and for its search, exact or rough."""


class Kind(NamedTuple):
    """Launches that a kind of cycle (decoding.settings.SamplingKind) adds to a greedy one."""

    choice: float
    """The choice of the target's tokens."""
    level: float
    """Per level of the tree, the first included."""
    learning: float
    """The drafter learns from what was chosen."""


@dataclass(frozen=True)
class LaunchCounts:
    """Launches of a cycle. The defaults are those of Llama-3.1-8B with an EAGLE-3 head, 7/1/8, batch 1 (25 November
    2026). With 5/4/8 a level takes 25 and the tree 15.
    """

    products: float = 4
    """Per layer of the target, as the next four."""
    attention: float = 2
    norms: float = 2
    """Norms and the additions before them."""
    rotations: float = 1
    sums: float = 1
    """Everything else: SwiGLU, and what XLA adds."""
    level: float = 19.5
    """Per level of the tree after the first: the head on one beam, and the next beam."""
    extension: float = 19
    """The head over the emitted tokens."""
    tree: float = 3
    """Choosing the best candidates and walking down the tree; plain cycles have none of these three."""
    other: float = 23
    """Rows of the state, sampling, the budget, writing the keys."""
    kinds: tuple[Kind, ...] = (Kind(0, 0, 0), Kind(1, 4, 11), Kind(4, 8, 11), Kind(13, 15, 11))
    """By kind: greedy, with a temperature only, filtered, adjusted."""

    @property
    def layer(self) -> float:
        """Launches per layer of the target."""
        return self.products + self.attention + self.norms + self.rotations + self.sums

    def of_head(self, head: HeadConfig, steps: int) -> "LaunchCounts":
        """These counts, made for a head of one layer that runs once per level, adapted to another head."""
        more = (head.layer.num_layers - 1) * self.layer
        return replace(self, level=(self.level + more) * head.forwards(steps) / max(steps, 1), extension=self.extension + more)


def counts_of(compiled: CompiledCycle, tree: TreeShape) -> LaunchCounts:
    """The counts of a compiled cycle. What its tree lacks, such as levels, stays the default's."""
    launches = compiled.greedy_launches
    in_layers = [launch for launch in launches if launch.stage == "verify" and launch.layer is not None]
    kinds = [kind_of(launch) for launch in in_layers if launch.layer == 1]  # the first layer has some that run once
    number = Counter(kinds)
    found = LaunchCounts(number["products"], number["attention"], number["norms"], number["rotations"], number["sums"])
    num_layers = len({launch.layer for launch in in_layers})
    rest = len(launches) - num_layers * len(kinds) - 2  # the last norm and the output projection are counted by the model
    found = replace(found, kinds=tuple(added(compiled, kind, tree) for kind in KINDS))
    if tree.num_steps == 0:
        return replace(found, other=rest)
    stages = compiled.stages
    extension, ranking = stages.get("extend", 0), stages.get("build_tree", 0) + stages.get("accept", 0)
    found, rest = replace(found, extension=extension, tree=ranking), rest - extension - ranking
    if (levels := tree.of_head.num_steps) < 2:
        return replace(found, other=rest)
    drafting = stages.get("draft", 0)
    return replace(found, level=drafting / (levels - 1), other=rest - drafting)


def added(compiled: CompiledCycle, kind: int, tree: TreeShape) -> Kind:
    """The launches that a kind of cycle adds to a greedy one."""
    greedy, of_kind = (Counter(launch.stage for launch in compiled.launches_of(each)) for each in (0, kind))
    of_kind.subtract(greedy)
    return Kind(of_kind["verify"], of_kind["draft"] / max(tree.of_head.num_steps, 1), of_kind["learn"])


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
    *,
    kind: int = 0,
    in_graph: bool = True,
    nodes: int = 1,
) -> dict[str, float]:
    """The parts of a cycle's time in milliseconds, in the order of their names below; their sum is the cycle's.

    Args:
        batch: Requests. The model is meant for a few rows: large products are taken to reach the data sheet's peak.
        context: Committed tokens of each request.
        counts: None: the defaults of LaunchCounts.
        copy_speed: Bytes per second of a copy measured on the device; None: COPY_SHARE of the bandwidth.
        kind: A decoding.settings.SamplingKind, 0: greedy.
        in_graph: The cycle is a CUDA graph; else the host launches each kernel, and what it takes longer than the GPU is a part.
        nodes: Machines that the GPUs are in.

    Raises ValueError if the tree needs a head, as all but the plain one do, and there is none.
    """
    cost = cycle_cost(models, tree, batch, context)
    head, levels = models.head_config if tree.num_steps else None, tree.of_head.num_steps
    draft_layers, forwards = (head.layer.num_layers, head.forwards(levels)) if head else (1, 0)
    if counts is None:
        counts = LaunchCounts().of_head(head, levels) if head else LaunchCounts()
    copy = copy_speed or COPY_SHARE * gpu.bandwidth
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
        extra = attention_seconds(counts.attention) - LAUNCH * counts.attention  # the launches are counted with the others
        parts |= {
            "head: weights": product_seconds(moved["head weights"] + moved["head logits' weights"], cost, gpu, copy),
            "head: attention": forwards * draft_layers * extra + moved["head cache"] / copy,
            "head: launches of the levels": LAUNCH * counts.level * max(0, levels - 1),
            "head: launches of the extension": LAUNCH * counts.extension,
            "tree": LAUNCH * counts.tree,
        }
    parts["logits, written and read"] = moved["logits"] / copy
    parts["state, greedy choice, conditionals"] = LAUNCH * counts.other
    if models.tp > 1:
        each = EXCHANGE if nodes == 1 else EXCHANGE_OF_MACHINES
        parts["exchanges between GPUs"] = each * exchanges(layers, forwards, draft_layers) + moved["logits"] / 2 / LINK
    if kind:
        parts |= sampling(models, tree, batch, gpu, counts.kinds[kind], copy, is_filtered=kind > 1)
    if not in_graph:
        number = launches_of(counts, layers, tree, kind)
        parts["launches by the host: no CUDA graph"] = max(0.0, HOST_LAUNCH * number - sum(parts.values()))
    return {name: 1e3 * seconds for name, seconds in parts.items()}


def exchanges(layers: int, forwards: int, draft_layers: int = 1) -> int:
    """Sums and gatherings of a cycle. Sums: one of embeddings and two per layer, in the target's forward and in each of the
    head's. Gatherings: one of logits in each forward, and one of the head's projection.

    In: 80 layers, 3 forwards  Out: 2 * 80 + 1 + 3 * 3 sums and 3 + 2 gatherings, 175
    """
    return 2 * layers + 1 + 1 + ((2 * draft_layers + 1) * forwards + forwards + 1 if forwards else 0)


def sampling(
    models: Pair, tree: TreeShape, batch: int, gpu: Gpu, kind: Kind, copy: float, *, is_filtered: bool
) -> dict[str, float]:
    """The extra seconds of a cycle that is not greedy. Noise, filters and the choice read logits from memory again."""
    nodes, steps, width = batch * tree.num_draft_tokens, tree.of_head.num_steps, models.target.config.vocab_size
    own = models.head_config.draft_vocab_size if models.head_config else None
    drafted, drafts = own or width, batch * (1 + (steps - 1) * tree.topk) if steps else 0
    numbers = nodes * width + drafts * drafted
    noise = batch * (tree.num_draft_tokens * width + (steps + bool(steps)) * drafted)  # of levels, and to learn from
    passes = 5 if is_filtered else 3
    parts = {
        "sampled: launches": LAUNCH * (kind.choice + steps * kind.level + kind.learning * bool(steps)),
        "sampled: noise": noise * NOISE_INSTRUCTIONS / (INSTRUCTIONS_SHARE * gpu.arithmetic),
        "sampled: logits, read again": passes * 4 * numbers / copy,
    }
    if is_filtered:
        waves, of_level = -(-nodes // CORES), -(-batch * tree.topk // CORES)
        cycles = waves * (CUTOFF_CYCLES * width + CUTOFF_SEARCH) + steps * of_level * (CUTOFF_CYCLES * drafted + ROUGH_SEARCH)
        parts["sampled: cut-off"] = cycles / CLOCK
    return parts


def launches_of(counts: LaunchCounts, layers: int, tree: TreeShape, kind: int) -> float:
    """All launches of a cycle of this kind."""
    choice, level, learning = counts.kinds[kind]
    target = layers * counts.layer + 2 + counts.other + choice
    if tree.num_steps == 0:
        return target
    steps = tree.of_head.num_steps
    return target + counts.level * max(0, steps - 1) + counts.extension + counts.tree + steps * level + learning * bool(steps)


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
        "seconds_per_launch_without_a_graph": HOST_LAUNCH,
        "seconds_per_exchange_in_a_machine": EXCHANGE,
        "seconds_per_exchange_of_machines": EXCHANGE_OF_MACHINES,
    }
