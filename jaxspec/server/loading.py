"""From a checked command line to a model that is ready to serve."""

import logging
import sys
import warnings
from pathlib import Path

import jax

from jaxspec.checkpoints.loading import head_kind
from jaxspec.config import PLAIN
from jaxspec.engine.stored_traces import stored_traces
from jaxspec.llm import DEMO, LLM, find_own_head
from jaxspec.server.arguments import ALGORITHMS, ServerArguments, in_flags
from jaxspec.server.chat_template import ChatTemplate
from jaxspec.startup_report import memory_table, programs_line

MAX_TEMPLATE_BYTES = 2**20

logger = logging.getLogger("jaxspec")


def load(arguments: ServerArguments) -> LLM:
    """The model, without compiled programs. Raises ValueError or OSError, saying what is wrong with the settings or files."""
    head = find_head(arguments)
    trees = arguments.request_trees
    if trees is None:
        trees = (PLAIN,) if head else ()
    options = {**arguments.engine, "request_trees": trees, "token_map": arguments.token_map, "dtype": arguments.dtype}
    logger.info("loading %s", arguments.model or "the built-in model")
    bars = arguments.shows_progress and sys.stderr.isatty()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        llm = LLM(arguments.model, arguments.draft, arguments.spec, progress=bars, **options)
    for warning in caught:
        logger.warning("%s", in_flags(str(warning.message)))  # such as that lossy thresholds are set
    log_model(llm, arguments)
    return llm


def log_model(llm: LLM, arguments: ServerArguments) -> None:
    """What was loaded, and what may surprise about it."""
    engine, stats = llm.engine, llm.engine.stats()
    tree = f"{llm.head.config.algorithm} draft tree {engine.spec}" if llm.head else "plain decoding"
    logger.info("model %s, context length %d tokens, %s", llm.model_name, engine.context_length, tree)
    if (tokens := stats.total_pages * stats.page_size) < engine.context_length:
        logger.warning("the cache holds less than the context length: requests may have up to %d tokens", tokens)
    if jax.default_backend() == "cpu":
        if arguments.dtype in ("bfloat16", "float16"):
            logger.warning("--dtype %s works on a CPU, but is several times slower than float32 there", arguments.dtype)
        if "mem_fraction" in arguments.engine:
            logger.info("--mem-fraction-static has no effect on a CPU: --max-total-tokens sets the size of the cache")


def find_head(arguments: ServerArguments) -> Path | None:
    """Where the draft head is; None: there is none, or --speculative-algorithm NONE.

    Raises ValueError if it is not what --speculative-algorithm says (elsewhere a wrong name costs all speed silently), or if
    there is none, but flags that need one.
    """
    head = None
    if arguments.spec is None or arguments.spec.num_steps:
        model = DEMO / "target" if arguments.model is None else Path(arguments.model)
        head = find_own_head(model) if arguments.draft is None else Path(arguments.draft)
        if arguments.algorithm is not None:
            found = None if head is None else head_kind(head)
            if found not in ALGORITHMS[arguments.algorithm]:
                none = f"{head or model} holds no head: give --speculative-draft-model-path"
                what = f"{head} holds an {found} head" if found else none
                raise ValueError(f"--speculative-algorithm {arguments.algorithm} was given, but {what}")
    if head is None and arguments.head_flags:
        flag = arguments.head_flags[0]
        raise ValueError(f"{flag} has no use without a draft head, and there is none: give --speculative-draft-model-path")
    return head


def load_chat_template(arguments: ServerArguments, llm: LLM) -> ChatTemplate | None:
    """The given template, else the model's, if it has one. Raises ValueError or OSError if it can't be used."""
    path = arguments.chat_template
    if path is None:
        return ChatTemplate.of_model(llm.tokenizer)
    if path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise ValueError(f"--chat-template {path} is larger than {MAX_TEMPLATE_BYTES} bytes")
    return ChatTemplate.of_model(llm.tokenizer, path.read_text(encoding="utf-8"), f"--chat-template {path}")


def compile_programs(llm: LLM, *, progress: bool) -> None:
    """Makes every program ready, and says in the log what memory and time it took."""
    head = llm.head.config if llm.head else None
    llm.engine.runner.programs.traces = stored_traces(llm.target.config, head, llm.engine.config)  # for the next start
    seconds = llm.engine.warm_up(progress=progress)
    logger.info("%s", programs_line(llm.engine.runner.programs.compilations, seconds))
    logger.info("memory:\n%s", memory_table(llm))
