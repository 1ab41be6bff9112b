"""`jaxspec plan`: whether a model and its draft head fit on a GPU, what a cycle launches, and its lower bound of time.

It needs no GPU: weights, cache and bytes are counted from the configs, temporaries and launches from the cycle that XLA's GPU
compiler makes (compile.py).
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxspec.checkpoints.hub import HubOptions, is_hub_name
from jaxspec.checks import Number
from jaxspec.commands.common import run_guarded
from jaxspec.commands.options import HEAD, OPTIONS, Parser, add_model_options, whole
from jaxspec.config import EngineConfig
from jaxspec.defaults import BUILT_IN_NAME, FROM_TEXT, default_tree, draft_path, gpu_dtype, model_directory
from jaxspec.model_config import UNQUANTIZED
from jaxspec.planner.compile import CompiledCycle, CompilerError, CycleShape, Quantizations, compile_cycles, why_not
from jaxspec.planner.gpus import DRIVER, GPUS, Gpu
from jaxspec.tree_shape import PLAIN, TreeShape

if TYPE_CHECKING:
    from jaxspec.planner.plan import Plan

JAX_SHARE = 0.75
"""JAX's default share of a GPU's memory (XLA_PYTHON_CLIENT_MEM_FRACTION)."""
SHARE, SIZE = Number(0, 1, above=True), Number(0, 10**6, above=True)
PROG = "jaxspec plan"
EXAMPLES = """examples:
  jaxspec plan --model-path Llama-3.1-8B-Instruct --draft EAGLE3-LLaMA3.1-Instruct-8B --gpu h100 --batch 8 --context 4096
  jaxspec plan --model-path config.json --draft head/config.json --gpu a100 --tree 3/1/4 --accept-length 2.9
The exit status is 0 if it fits, 1 if not."""
POWERS = tuple(2**power for power in range(7))
"""Numbers of GPUs that `Plan.smallest` may be."""
FEWER_BITS = ("int8", "int4")
"""What `Plan.fewer_bits` may be, the most exact first."""


def make_parser(prog: str = PROG) -> Parser:
    """Builds the parser; it loads no JAX, so --help is instant."""
    about = "Whether a model fits on a GPU, and how fast it can be there; needs no GPU, and of a model only its config.json."
    parser = Parser(prog, about, EXAMPLES)
    add_model_options(parser)
    parser.by_name["--draft"].help = "a draft head or small model: its name on the Hub, or a path (default: the model's own)"
    group = parser.add_argument_group("GPU")
    add = group.add_argument
    add("--gpu", type=str.lower, choices=GPUS, default="h100", metavar="NAME", help=f"{', '.join(GPUS)} (default: %(default)s)")
    add("--tp", "--tp-size", type=whole(1), default=1, metavar="N", help="GPUs that share the model (default: %(default)s)")
    add("--nnodes", type=whole(1), default=1, metavar="N", help="machines that they are in (default: %(default)s)")
    add("--gpu-memory", type=float, metavar="GB", help="instead of the data sheet's")
    driver_help = "CUDA version of the driver, which nvidia-smi shows (default: %(default)s)"
    add("--cuda-driver", type=cuda_version, default=DRIVER, metavar="VERSION", help=driver_help)
    add("--gpu-bandwidth", type=float, metavar="GB/S", help="instead of the data sheet's, such as a measured one")
    OPTIONS["mem_fraction_static"].add_to(group, default=EngineConfig.mem_fraction)
    share_help = "XLA_PYTHON_CLIENT_MEM_FRACTION (default: %(default)s)"
    add("--jax-memory-share", type=float, default=JAX_SHARE, metavar="X", help=share_help)
    group = parser.add_argument_group("load")
    add = group.add_argument
    about = "the draft tree, or plain; S/K/D/H: n-grams beside a head of H levels (default: the head's, as on a GPU)"
    OPTIONS["tree"].add_to(group, help=about)
    add("--batch", type=whole(1), default=1, metavar="N", help="requests in a batch (default: %(default)s)")
    add("--context", type=whole(1), default=2048, metavar="N", help="tokens per request, prompt and output (default: %(default)s)")
    OPTIONS["page_size"].add_to(group, type=whole(1), default=EngineConfig.page_size)
    OPTIONS["kv_cache_dtype"].add_to(group, default=EngineConfig.kv_cache_dtype)
    OPTIONS["speculative_draft_kv_cache_dtype"].add_to(group)
    OPTIONS["attention_kernel"].add_to(group)
    OPTIONS["matmul"].add_to(group, default=EngineConfig.matmul)
    length_help = "tokens per cycle: `jaxspec check-draft` measures it"
    add("--accept-length", type=float, nargs="+", default=[], metavar="X", help=length_help)
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile the cycle with XLA to count temporaries and launches, in about 30 s (default: if possible)",
    )
    parser.add_argument("--details", action="store_true", help="show what the answer is made of, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Returns 0 if it fits, 1 if not, 2 if the model can't be read."""
    parser = make_parser(prog)
    options = parser.parse_args(argv)

    def run() -> int:
        from jaxspec.planner.plan import as_json
        from jaxspec.planner.report import show

        plan = make_plan(options)
        print(json.dumps(as_json(plan), indent=1) if options.json else show(plan, with_details=options.details))
        return 0 if plan.fits else 1

    return run_guarded(parser.prog, run)


def name_of(model: Path) -> str:
    """The name on the Hub, or the directory's."""
    return str(model) if is_hub_name(model) else (model.parent if model.is_file() else model).resolve().name


def make_plan(options: argparse.Namespace) -> "Plan":
    """Reads the configs and computes the plan. Raises ValueError if a config or option can't be used."""
    from jaxspec.checkpoints.draft_models import inherited_quantization
    from jaxspec.planner.estimate import Memory, Pair, cycle_cost, pair
    from jaxspec.planner.models import read_head, read_target
    from jaxspec.planner.plan import Plan

    hub = HubOptions(options.revision, options.download_dir, options.speculative_draft_model_revision)
    path = model_directory(options.model_path, hub, weights=False)
    draft = options.speculative_draft_model_path
    if draft == FROM_TEXT:
        raise ValueError("the times of drafts from the text are not known: give a head as --draft, or --tree plain")
    where = None if options.tree == PLAIN else draft_path(draft, path, hub, weights=False)
    given = (OPTIONS[name].flag for name in (*HEAD, "speculative_draft_kv_cache_dtype") if vars(options)[name] is not None)
    if where is None and (flag := next(given, None)) is not None:
        plain = f"--tree plain drafts nothing: leave out {flag}"
        raise ValueError(plain if options.tree == PLAIN else f"{flag} needs a draft head: give --draft")
    quantization = quantizations(options, where)
    target = read_target(path, quantization.target)
    head = None if where is None else read_head(where, target, options.speculative_token_map, quantization.head)
    tree = options.tree or (default_tree(None) if head is None else default_tree(head.algorithm, where, head.max_steps))
    drafted = tree.num_steps if tree.head_steps is None else tree.head_steps
    if head is not None and head.max_steps is not None and drafted > head.max_steps:
        raise ValueError(f"--tree {tree} is too deep: the head drafts at most {head.max_steps} tokens")
    dtype = options.dtype if options.dtype != "auto" else gpu_dtype(target.dtype)
    caches = {"kv_cache_dtype": options.kv_cache_dtype, "draft_kv_cache_dtype": options.speculative_draft_kv_cache_dtype}
    if options.tp % options.nnodes:
        raise ValueError(f"--nnodes {options.nnodes} machines can't have the same number of --tp {options.tp} GPUs")
    models = pair(target, head, dtype, options.tp, **caches)
    gpu = chosen_gpu(options)
    fraction = SHARE.clean("--mem-fraction-static", options.mem_fraction_static)
    shares = SHARE.clean("--jax-memory-share", options.jax_memory_share), fraction
    kernels = {"attention_kernel": options.attention_kernel, "matmul": options.matmul}
    EngineConfig(**caches, **kernels)  # refuses what does not go together

    def memory_of(models: Pair) -> Memory:
        return Memory(gpu.memory, *shares, models.weights, models.cache, options.page_size, models.most_tokens)

    def is_enough(models: Pair) -> bool:
        return memory_of(models).requests(options.context) >= options.batch

    def stored(bits: str) -> Pair:
        of_head = None if where is None else inherited_quantization(where, bits)
        smaller = None if where is None else read_head(where, target, options.speculative_token_map, of_head)
        return pair(read_target(path, bits), smaller, dtype, options.tp, **caches)

    enough = (tp for tp in POWERS if is_enough(pair(target, head, dtype, tp, **caches)))
    may_shrink = quantization == (None, None) and models.target.weights == models.target.dense and not is_enough(models)
    fewer_bits = (bits for bits in FEWER_BITS if may_shrink and is_enough(stored(bits)))
    of_both = tree.head_steps is not None  # its deeper levels are those of n-grams
    shape = CycleShape(tree, options.batch, options.context, options.page_size, **caches, **kernels, ngram=of_both)
    return Plan(
        model=BUILT_IN_NAME if options.model_path is None else name_of(options.model_path),
        models=models,
        gpu=gpu,
        tree=tree,
        batch=options.batch,
        context=options.context,
        longest=target.max_position_embeddings,
        memory=memory_of(models),
        cycle=cycle_cost(models, tree, options.batch, options.context),
        plain=cycle_cost(models, PLAIN, options.batch, options.context),
        accept_lengths=tuple(accept_lengths(options.accept_length, tree)),
        compiled=compiled_cycle(options, shape, path, where, dtype),
        copy_speed=None if options.gpu_bandwidth is None else gpu.bandwidth,
        driver=options.cuda_driver,
        nodes=options.nnodes,
        smallest=next(enough, None),
        fewer_bits=next(fewer_bits, None),
    )


def compiled_cycle(
    options: argparse.Namespace, shape: CycleShape, model: Path, draft: Path | None, dtype: str
) -> CompiledCycle | str:
    """The compiled cycle, or the reason why it was not compiled."""
    if not options.compile:
        return "--no-compile was given"
    if reason := why_not(options.gpu):
        return reason
    how = {"gpu": options.gpu, "dtype": dtype, "token_map": options.speculative_token_map, "driver": options.cuda_driver}
    how |= {"quantization": quantizations(options, draft), "tp": options.tp, "nodes": options.nnodes}
    print(f"compiling the cycle for {GPUS[options.gpu].name} (--no-compile skips this) ...", file=sys.stderr, flush=True)
    try:
        return compile_cycles(model, draft, [shape], **how, refuse_spills=True)[0]
    except CompilerError as refused:
        try:
            (compiled,) = compile_cycles(model, draft, [shape], **how)
        except CompilerError as error:
            return f"the compiler failed: {error}"
        return replace(compiled, spills=str(refused))


def quantizations(options: argparse.Namespace, draft: Path | None) -> Quantizations:
    """The quantizations that the options ask for, as when a model is loaded."""
    from jaxspec.checkpoints.draft_models import inherited_quantization

    target, head = options.quantization, options.speculative_draft_model_quantization
    if head is None and draft is not None:
        head = inherited_quantization(draft, target)
    return Quantizations(*(None if each in UNQUANTIZED else each for each in (target, head)))


def cuda_version(text: str) -> str:
    """A type of option."""
    if re.fullmatch(r"\d+\.\d+(\.\d+)?", text) is None:
        raise argparse.ArgumentTypeError(f"must be a version such as 12.8, got {text!r}")
    return text if text.count(".") == 2 else f"{text}.0"


def chosen_gpu(options: argparse.Namespace) -> Gpu:
    """The chosen GPU, with memory and bandwidth from the options if given."""
    gpu = GPUS[options.gpu]
    if options.gpu_memory is not None:
        gpu = gpu._replace(memory=SIZE.clean("--gpu-memory", options.gpu_memory) * 1e9)
    if options.gpu_bandwidth is not None:
        gpu = gpu._replace(bandwidth=SIZE.clean("--gpu-bandwidth", options.gpu_bandwidth) * 1e9)
    return gpu


def accept_lengths(given: Sequence[float], tree: TreeShape) -> Sequence[float]:
    """The given accept lengths, else some that the tree can reach. Raises ValueError for one that it can't."""
    for length in given:
        if not 1 <= length <= tree.num_steps + 1:
            raise ValueError(f"--accept-length must be from 1 to {tree.num_steps + 1} with the tree {tree}, got {length:g}")
    return given or [length / 2 for length in range(2 if tree.num_steps == 0 else 3, min(8, 2 * tree.num_steps + 2) + 1)]
