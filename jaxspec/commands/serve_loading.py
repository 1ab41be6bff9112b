"""Loads and warms up the model of a checked command line, and logs it."""

import contextlib
import json
import logging
import sys
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxspec.checkpoints.draft_models import draft_kind
from jaxspec.checkpoints.json_files import read_object
from jaxspec.commands.common import in_flags
from jaxspec.commands.serve_options import ALGORITHMS, ServerArguments
from jaxspec.decoding.programs import Program
from jaxspec.defaults import FROM_TEXT, SMOLLM2, SMOLLM2_SAMPLING, draft_path, model_directory
from jaxspec.engine.device import GRAPHS_SINCE, driver_version, makes_graphs
from jaxspec.engine.host_group import ALONE, HostGroup
from jaxspec.engine.memory import readable
from jaxspec.engine.programs import Compilation
from jaxspec.load import LoadedModels, load_models
from jaxspec.sampling_params import LEAST_TEMPERATURE, SamplingParams
from jaxspec.text.chat_formats import CHAT_FORMATS
from jaxspec.text.chat_template import ChatTemplate
from jaxspec.tree_shape import PLAIN, names_of

MAX_TEMPLATE_BYTES = 2**20
RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What a model's generation_config.json may recommend: the values that SGLang takes from it. (vLLM also takes max_new_tokens.)"""
SLOWEST = 3
"""Slow programs that the log names."""

logger = logging.getLogger("jaxspec")


def load(arguments: ServerArguments, group: HostGroup = ALONE) -> LoadedModels:
    """The model, without compiled programs, and its engine, which leads the group. Raises ValueError or OSError if the settings or
    files are wrong."""
    models = read(arguments)
    models.group = group
    with warnings_in_log():
        models.engine  # noqa: B018  # made here: it may warn, and refuse a setting
    log_model(models, arguments)
    return models


def read(arguments: ServerArguments) -> LoadedModels:
    """The model, without an engine. Raises ValueError or OSError if the settings or files are wrong."""
    head = find_head(arguments)
    trees = arguments.request_trees
    if trees is None:
        trees = (PLAIN,) if head or arguments.engine.get("ngram") else ()
    options = {**arguments.engine, "request_trees": trees, "token_map": arguments.token_map, "dtype": arguments.dtype}
    options |= {"quantization": arguments.quantization, "speculative_draft_model_quantization": arguments.draft_quantization}
    options |= arguments.hub._asdict()
    logger.info("loading %s", arguments.model or "the built-in model")
    bars = arguments.shows_progress and sys.stderr.isatty()
    draft = head if arguments.draft is None and arguments.algorithm is not None else arguments.draft  # a kind of head was asked for
    with warnings_in_log():
        return load_models(arguments.model, draft, arguments.tree, progress=bars, **options)


@contextlib.contextmanager
def warnings_in_log() -> Iterator[None]:
    """Logs warnings, such as that lossy thresholds are set, with flags in place of the names of fields."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        logger.warning("%s", in_flags(str(warning.message)))


def log_model(models: LoadedModels, arguments: ServerArguments) -> None:
    """Logs the model, its tree, and options with surprising effects."""
    engine = models.engine
    tree = f"{models.algorithm} draft tree {engine.tree}" if engine.tree.num_steps else "plain decoding"
    if engine.tree == PLAIN and engine.config.adaptive:
        tree = f"{models.algorithm} drafts, the fastest of {names_of(models.trees)} (--speculative-algorithm NONE turns them off)"
    logger.info("model %s, context length %d tokens, %s", models.name, engine.context_length, tree)
    if models.longest < engine.context_length:
        logger.warning("the cache holds less than the context length: requests may have up to %d tokens", models.longest)
    if jax.default_backend() == "cpu" and arguments.dtype in ("bfloat16", "float16"):
        logger.warning("--dtype %s works on a CPU, but auto is faster there, and more exact", arguments.dtype)
    if jax.default_backend() == "gpu" and (driver := driver_version()) and not makes_graphs(driver):
        needed = ".".join(map(str, GRAPHS_SINCE))
        logger.warning(
            "driver of CUDA %s: the host launches every kernel; a cycle is a CUDA graph with %s or newer", driver, needed
        )


def find_head(arguments: ServerArguments) -> Path | None:
    """Where the draft head or model is; None: there is none, or --speculative-algorithm NONE.

    Raises ValueError if it is not of the kind that --speculative-algorithm names (in other servers a wrong one silently costs all
    speed-up), or if there is none, or no tree of drafts, but a flag needs one.
    """
    head = None
    if arguments.draft != FROM_TEXT and (arguments.tree is None or arguments.tree.num_steps):
        model = model_directory(arguments.model, arguments.hub)
        head = draft_path(arguments.draft, model, arguments.hub)
        if arguments.algorithm is not None:
            found = None if head is None else draft_kind(head)
            if found not in ALGORITHMS[arguments.algorithm]:
                none = f"{head or model} holds no head: give --speculative-draft-model-path"
                own = (
                    f"{head} holds a whole model: give STANDALONE"
                    if found == "STANDALONE"
                    else f"{head} holds a draft head ({found})"
                )
                what = own if found else none
                raise ValueError(f"--speculative-algorithm {arguments.algorithm} was given, but {what}")
    if head is None and arguments.head_flags:
        flag = arguments.head_flags[0]
        if arguments.tree is not None and not arguments.tree.num_steps:
            way = "give a tree of drafts (requests turn it off with speculative.enabled false)"
            raise ValueError(f"{flag} can't be combined with --tree plain: {way}")
        raise ValueError(f"{flag} needs a draft head, and there is none: give --speculative-draft-model-path")
    return head


def load_chat_template(arguments: ServerArguments, models: LoadedModels) -> ChatTemplate | None:
    """The given template, else the model's, if it has one. Raises ValueError or OSError if it can't be used."""
    given = arguments.chat_template
    if given is None:
        return ChatTemplate.of_model(models.tokenizer)
    if given in CHAT_FORMATS:
        template, stop = CHAT_FORMATS[given]
        begin = json.dumps(models.tokenizer.decode(models.tokenizer.encode("")) if models.tokenizer else "")  # Llama's <s>
        return ChatTemplate.of_model(models.tokenizer, f"{{{{ {begin} }}}}{template}", f"--chat-template {given}", stop)
    path = Path(given)
    if path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise ValueError(f"--chat-template {path} is larger than {MAX_TEMPLATE_BYTES} bytes")
    return ChatTemplate.of_model(models.tokenizer, path.read_text(encoding="utf-8"), f"--chat-template {path}")


def sampling_defaults(directory: Path, name: str = "") -> dict[str, Any]:
    """The sampling values of a model's generation_config.json, which its makers recommend; without one, `smollm2` is greedy.
    Raises ValueError for a wrong one.

    In:  {"do_sample": true, "temperature": 0.6, "top_k": 20, "eos_token_id": 2}
    Out: {"temperature": 0.6, "top_k": 20}
    """
    path = directory / "generation_config.json"
    written = read_object(path) if path.is_file() else SMOLLM2_SAMPLING if name == SMOLLM2 else {}
    found = {field: written[field] for field in RECOMMENDED if written.get(field) is not None}
    if isinstance(temperature := found.get("temperature"), float) and 0 < temperature < LEAST_TEMPERATURE:
        found["temperature"] = 0.0  # some files mean greedy by 1e-6
    try:
        SamplingParams.of(found)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}; --sampling-defaults openai ignores it") from None
    if found:
        listed = ", ".join(f"{field}={value}" for field, value in found.items())
        logger.info("OpenAI's endpoints use the model's own %s (--sampling-defaults openai turns this off)", listed)
    return found


def compile_programs(models: LoadedModels, ahead: str | None, *, progress: bool) -> None:
    """Compiles the programs that serving needs, and logs the time and memory that they take.

    `ahead`: "first", those that serve every request, or "all". None: first on a CPU, all on a GPU, where XLA times its choices
    and must run alone.
    """
    ahead = ahead or ("first" if jax.default_backend() == "cpu" else "all")
    if not progress:
        logger.warning("compiling programs, which can take minutes at a first start; --log-level info shows how far it is")
    seconds = models.engine.warm_up(progress=progress, wait_for_all=ahead == "all")
    models.engine.runner.programs.ask_for_more()  # also after "all", which leaves out those for grammars
    logger.info("%s", programs_line(models.engine.runner.programs.compilations, seconds))
    logger.info("memory:\n%s", memory_table(models))


def memory_table(models: LoadedModels) -> str:
    """The memory of weights, cache and programs, one line each, and the total.

    Out:   target weights   24.1 MB
           head weights      3.3 MB
           cache            92.3 MB  8192 tokens in 512 pages, taken as they are used
           ...
           total           139.0 MB  of 68.2 GB
    """
    runner, stats = models.engine.runner, models.engine.stats()
    temporaries = {program: runner.programs.temporary_bytes(program) for program in largest(runner.programs.compilations)}
    most = models.engine.config.max_running_requests
    each = f"on each of {devices} devices" if (devices := len(runner.placement.devices)) > 1 else ""
    lazily = ", taken as they are used" if jax.default_backend() == "cpu" else ""
    rows = [
        ("target weights", runner.placement.nbytes(runner.params["target"]), each),
        ("head weights", runner.placement.nbytes(runner.params["draft"]), each),
        ("cache", runner.cache_bytes, f"{stats.total_tokens} tokens in {stats.total_pages} pages{lazily}"),
        ("requests", runner.placement.nbytes(runner.programs.state) - runner.cache_bytes, f"{most} at a time"),
    ]
    program = max(temporaries, key=lambda program: temporaries[program])
    rows.append(("temporaries", temporaries[program], f"of the largest program: {program}"))
    limit = (runner.placement.device.memory_stats() or {}).get("bytes_limit")
    total = sum(size for _, size, _ in rows)
    rows.append(("total", total, f"of {readable(limit)}, {100 * total / limit:.0f}%" if limit else ""))
    return "\n".join(f"  {name:<15}{readable(size):>10}  {note}".rstrip() for name, size, note in rows if size)


def largest(programs: Iterable[Program]) -> list[Program]:
    """The largest program of each kind and tree; only the compiler knows which of these needs the most memory, and asking it takes
    about 50 ms per program.

    In:  cycle 5/4/8, batch 1; cycle 5/4/8, batch 8; prefill 64 tokens; admit
    Out: cycle 5/4/8, batch 8; prefill 64 tokens; admit
    """
    found: dict[Hashable, Program] = {}
    for program in programs:
        found[program.kind] = max(program, found.get(program.kind, program), key=lambda each: each.size)
    return list(found.values())


def programs_line(compilations: Mapping[Program, Compilation], seconds: float) -> str:
    """The number of compiled and cached programs, and the slowest.

    Out: compiled 19 programs in 61.3 s (0 from the cache; slowest: cycle 5/4/8, batch 8: 9.1 s; admit: 0.5 s)
    """
    compiled = {program: done.seconds for program, done in compilations.items() if not done.from_cache}
    slowest = sorted(compiled, key=lambda program: -compiled[program])[:SLOWEST]
    named = f"; slowest: {'; '.join(f'{program}: {compiled[program]:.1f} s' for program in slowest)}" if slowest else ""
    cached = len(compilations) - len(compiled)
    return f"compiled {len(compilations)} programs in {seconds:.1f} s ({cached} from the cache{named})"
