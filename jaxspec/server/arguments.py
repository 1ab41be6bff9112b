"""The command line of the server, with SGLang's names. Importing this loads neither JAX nor transformers: --help is instant."""

import argparse
import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxspec.config import EngineConfig, SpecConfig

ALGORITHMS = {"EAGLE": ("EAGLE", "MTP"), "EAGLE3": ("EAGLE3",), "NEXTN": ("MTP",), "NONE": ()}
"""SGLang's names, and the kinds of head (HeadConfig.algorithm) that each stands for."""
NOT_YET = ("STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO")
_FLAGS = {
    "context_length": "context_length",
    "page_size": "page_size",
    "prefill_chunk": "chunked_prefill_size",
    "max_running_requests": "max_running_requests",
    "mem_fraction": "mem_fraction_static",
    "random_seed": "random_seed",
    "max_waiting_requests": "max_queued_requests",
    "draft_window_size": "speculative_draft_window_size",
    "draft_sink_size": "speculative_draft_sink_size",
    "accept_threshold_single": "speculative_accept_threshold_single",
    "accept_threshold_acc": "speculative_accept_threshold_acc",
}
"""Fields of EngineConfig and the flags that set them to a value."""
_CACHE_FLAG = "max_total_tokens"
"""Its tokens become num_pages."""
MAX_QUEUED_REQUESTS = 1024
"""What --max-queued-requests is by default: a server's queue must have an end."""
_TREE_FLAGS = (
    "speculative_draft_model_path",
    "speculative_token_map",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)
HEAD_FLAGS = (
    "speculative_adaptive",
    "speculative_draft_window_size",
    "speculative_draft_sink_size",
    "speculative_accept_threshold_single",
    "speculative_accept_threshold_acc",
)
"""Flags that mean nothing without a draft head; the model's loading tells that of _TREE_FLAGS."""
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True)
class ServerArguments:
    """A checked command line."""

    model: str | None
    """None: the built-in model."""
    draft: str | None
    """None: the head that comes with the model, if there is one."""
    algorithm: str | None
    """One of ALGORITHMS, which the head must be; None: whatever it is."""
    token_map: str | None
    spec: SpecConfig | None
    """None: the default of the model and head."""
    dtype: str
    engine: dict[str, Any]
    """Fields of EngineConfig that were given."""
    host: str
    port: int
    served_model_name: str | None
    log_level: str
    given: dict[str, Any]
    """Every flag that is not at its default, for the log."""
    warnings: tuple[str, ...]
    """What was changed, for the log."""


class _Parser(argparse.ArgumentParser):
    """Ends a wrong command line with one line and exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def parse_arguments(argv: Sequence[str] | None = None) -> ServerArguments:
    """The command line, checked. Ends the process with status 2 and one clear line if it is wrong."""
    parser = _make_parser()
    options = parser.parse_args(argv)
    given = {name: value for name, value in vars(options).items() if value != parser.get_default(name)}
    algorithm = _algorithm(parser, options.speculative_algorithm)
    tree = (options.speculative_num_steps, options.speculative_eagle_topk, options.speculative_num_draft_tokens)
    if algorithm == "NONE":
        for name in _TREE_FLAGS + HEAD_FLAGS:
            if name in given:
                parser.error(f"{_flag(name)} has no use with --speculative-algorithm NONE: leave one of them out")
    engine = _engine_fields(parser, options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            EngineConfig(**engine)
            spec = SpecConfig(num_steps=0) if algorithm == "NONE" else _spec(tree)
        except ValueError as error:
            parser.error(in_flags(str(error)))
    return ServerArguments(
        model=options.model_path,
        draft=options.speculative_draft_model_path,
        algorithm=algorithm,
        token_map=options.speculative_token_map,
        spec=spec,
        dtype=options.dtype,
        engine=engine,
        host=options.host,
        port=options.port,
        served_model_name=options.served_model_name,
        log_level=options.log_level,
        given=given,
        warnings=tuple(str(warning.message) for warning in caught),
    )


def _make_parser() -> _Parser:
    engine = EngineConfig()
    parser = _Parser(
        prog="python -m jaxspec.serve",
        description="Serve a model with speculative decoding. Without --model-path: the built-in model and its head.",
        allow_abbrev=False,
    )
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model-path",
        "--model",
        metavar="DIR",
        help="model directory, Hugging Face's or a converted one (default: the built-in model)",
    )
    group.add_argument("--served-model-name", metavar="NAME", help="name in the API (default: that of the directory)")
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of weights and cache; auto: float32 on a CPU, float16 on a GPU if the checkpoint is, else bfloat16",
    )
    group.add_argument("--context-length", type=int, metavar="N", help="longest prompt and output together (default: the model's)")

    group = parser.add_argument_group("speculative decoding", "the three numbers of the tree: give all or none")
    group.add_argument(
        "--speculative-algorithm",
        metavar="NAME",
        help="EAGLE, EAGLE3, NEXTN, or NONE for plain decoding (default: what the head is, NONE without one)",
    )
    group.add_argument(
        "--speculative-draft-model-path",
        "--speculative-draft-model",
        metavar="DIR",
        help="the head's directory (default: the head that comes with the model, such as MiMo's)",
    )
    group.add_argument(
        "--speculative-adaptive",
        action="store_true",
        help="choose the tree, a chain or plain decoding for every cycle, by what was measured",
    )
    group.add_argument("--speculative-num-steps", type=int, metavar="N", help="levels drafted (default: 5; MTP: 1)")
    group.add_argument(
        "--speculative-eagle-topk", type=int, metavar="N", help="children kept per drafted token (default: 4; MTP: 1)"
    )
    group.add_argument(
        "--speculative-num-draft-tokens", type=int, metavar="N", help="nodes verified at once, root included (default: 8; MTP: 2)"
    )
    group.add_argument(
        "--speculative-token-map",
        metavar="FILE",
        help="FR-Spec's list of the tokens worth drafting (.pt, .json, .npy, .safetensors), for heads without their own",
    )
    group.add_argument(
        "--speculative-draft-window-size", type=int, metavar="N", help="the head sees the newest N tokens only (default: all)"
    )
    group.add_argument(
        "--speculative-draft-sink-size",
        type=int,
        metavar="N",
        help=f"and, beside that window, the pages of the first N (default: {engine.draft_sink_size})",
    )
    group.add_argument(
        "--speculative-accept-threshold-single",
        type=float,
        metavar="P",
        help="below 1 speculation is LOSSY, it changes what the model says: a draft is accepted if the target gives it "
        f"the probability P (default: {engine.accept_threshold_single})",
    )
    group.add_argument(
        "--speculative-accept-threshold-acc",
        type=float,
        metavar="P",
        help="below 1 speculation is LOSSY, it changes what the model says: the target's probabilities of drafts are divided "
        f"by P (default: {engine.accept_threshold_acc})",
    )

    group = parser.add_argument_group("engine")
    group.add_argument(
        "--max-running-requests",
        type=int,
        metavar="N",
        help=f"requests that decode together (default: {engine.max_running_requests})",
    )
    group.add_argument(
        "--max-queued-requests",
        type=int,
        default=MAX_QUEUED_REQUESTS,
        metavar="N",
        help="requests that wait, at most; further ones get status 503 (default: %(default)s)",
    )
    group.add_argument(
        "--chunked-prefill-size", type=int, metavar="N", help=f"prompt tokens computed per step (default: {engine.prefill_chunk})"
    )
    group.add_argument("--page-size", type=int, metavar="N", help=f"tokens per cache page (default: {engine.page_size})")
    group.add_argument(
        "--max-total-tokens",
        type=int,
        metavar="N",
        help="size of the cache in tokens (default: all running requests at full length, or what fits)",
    )
    group.add_argument(
        "--disable-radix-cache", action="store_true", help="compute every prompt in full, even if it begins like an earlier one"
    )
    group.add_argument(
        "--mem-fraction-static",
        type=float,
        metavar="X",
        help=f"share of a GPU's memory for weights and cache (default: {engine.mem_fraction})",
    )
    group.add_argument("--random-seed", type=int, metavar="N", help=f"for requests without a seed (default: {engine.random_seed})")

    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=_port, default=30000, metavar="N", help="port; 0: any free one (default: %(default)s)")
    group.add_argument("--log-level", type=str.lower, choices=LOG_LEVELS, default="info", help="(default: %(default)s)")
    return parser


def _algorithm(parser: _Parser, name: str | None) -> str | None:
    """One of ALGORITHMS, or None if not given."""
    if name is None or name.upper() in ALGORITHMS:
        return name and name.upper()
    if name.upper() in NOT_YET:
        parser.error(f"--speculative-algorithm {name.upper()} is not there yet; there is: {', '.join(ALGORITHMS)}")
    parser.error(f"--speculative-algorithm must be one of {', '.join(ALGORITHMS)}, got {name!r}")


def _spec(tree: tuple[int | None, int | None, int | None]) -> SpecConfig | None:
    return None if tree == (None, None, None) else SpecConfig(*tree)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 65535, got {text[:80]!r}")
    return int(text)


def _engine_fields(parser: _Parser, options: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineConfig, as far as they were given or the server's default differs."""
    fields = {field: value for field, flag in _FLAGS.items() if (value := getattr(options, flag)) is not None}
    if options.disable_radix_cache:
        fields["prefix_cache"] = False
    if options.speculative_adaptive:
        fields["adaptive"] = True
    if options.max_total_tokens is not None:
        page_size = max(1, fields.get("page_size", EngineConfig.page_size))
        if options.max_total_tokens < page_size:
            parser.error(f"--max-total-tokens must be at least one page, {page_size} tokens, got {options.max_total_tokens}")
        fields["num_pages"] = options.max_total_tokens // page_size
    return fields


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def in_flags(message: str, only: Collection[str] = (*_FLAGS, "num_pages")) -> str:
    """A message of the engine in the words of the command line; SpecConfig's words are the ends of its flags' names.

    In:  "prefill_chunk must be at least 1, got 0"
    Out: "--chunked-prefill-size must be at least 1, got 0"
    """
    flags = {name: _flag(flag) for name, flag in (_FLAGS | {"num_pages": _CACHE_FLAG}).items() if name in only}
    return re.sub(r"[a-z]+(_[a-z]+)+", lambda word: flags.get(word[0], word[0]), message)
