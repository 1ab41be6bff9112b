"""The options of the server, with SGLang's names and vLLM's beside them, and their help."""

import argparse
import contextlib
from typing import Any, NoReturn

from jaxspec.config import ATTENTION_KERNELS, EngineConfig
from jaxspec.server.ignored_flags import add_ignored, list_ignored
from jaxspec.server.parser import Group, Parser
from jaxspec.server.settings import ServerSettings

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
MAX_QUEUED_REQUESTS = 1024
"""What --max-queued-requests is by default: a server's queue must have an end."""
LOSSY = "below 1 speculation is LOSSY, it changes what the model says: "
DESCRIPTION = "Serve a model with speculative decoding. Without a model directory: the built-in model and its head."
EPILOG = """--help=WORD shows only the options that contain the word, such as --help=cache. Options of SGLang and vLLM that have
nothing to do here, such as those of CUDA graphs, are accepted, with one line in the log: --help=ignored lists them."""
ENGINE = EngineConfig()
"""Where the defaults in the help come from."""


def make_parser(only: str = "") -> Parser:
    """The parser; with `only`, of the options that contain the word."""
    parser = Parser(
        "python -m jaxspec.serve",
        usage="python -m jaxspec.serve [MODEL_DIR] [options]",
        description=None if only else DESCRIPTION,
        epilog=None if only else EPILOG,
        only=only,
    )
    _add_model(parser.add_group("model"))
    _add_tree(parser.add_group("speculative decoding", "the three numbers of the tree: give all or none"))
    _add_drafting(parser.add_group("speculative decoding, finer"))
    _add_engine(parser.add_group("engine"))
    _add_server(parser.add_group("server"))
    add_ignored(parser)
    return parser


def help_text(word: str) -> str:
    """The help; with a word, the options that contain it, those without effect too. "ignored": all of the latter."""
    if not word:
        return make_parser().format_help()
    ignored = list_ignored("" if word == "ignored" else word)
    shown = "" if word == "ignored" else make_parser(word).format_help().partition("\n\n")[2]  # without the usage
    parts = [shown.rstrip(), f"accepted without effect:\n{ignored}" if ignored else ""]
    return "\n\n".join(part for part in parts if part) or f"no option contains {word[:80]!r}"


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, _namespace: Any, word: Any, _name: str | None = None) -> NoReturn:
        with contextlib.suppress(BrokenPipeError):  # whoever reads it has seen enough
            print(help_text(word or ""), flush=True)
        parser.exit()


def port(text: str) -> int:
    """An option's type."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 65535, got {text[:80]!r}")
    return int(text)


def seconds(text: str) -> float:
    """An option's type: a time that may pass. 0 is allowed: at once."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 24 * 3600:
        raise argparse.ArgumentTypeError(f"must be seconds from 0 to a day's, got {text[:80]!r}")
    return value


def positive_seconds(text: str) -> float:
    """An option's type: a time that something may take."""
    if (value := seconds(text)) == 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _add_model(group: Group) -> None:
    group.add("model_dir", nargs="?", metavar="MODEL_DIR", help="the same as --model-path")
    group.add(
        "--model-path",
        "--model",
        metavar="DIR",
        help="model directory, Hugging Face's or a converted one (default: the built-in model)",
    )
    group.add("--tokenizer-path", "--tokenizer", metavar="DIR", help="must be the model's directory, whose tokenizer is used")
    group.add("--served-model-name", metavar="NAME", help="name in the API (default: that of the directory)")
    group.add(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="of weights and cache; auto: float32 on a CPU, float16 on a GPU if the checkpoint is, else bfloat16",
    )
    group.add(
        "--context-length",
        "--max-model-len",
        type=int,
        metavar="N",
        help="longest prompt and output together, in tokens (default: the model's)",
    )
    group.add("--chat-template", metavar="FILE", help="a Jinja template for conversations (default: the model's)")


def _add_tree(group: Group) -> None:
    group.add(
        "--speculative-algorithm",
        metavar="NAME",
        help="EAGLE, EAGLE3, NEXTN, or NONE for plain decoding (default: what the head is, NONE without one)",
    )
    group.add(
        "--speculative-draft-model-path",
        "--speculative-draft-model",
        metavar="DIR",
        help="the head's directory (default: the head that comes with the model, such as MiMo's)",
    )
    group.add("--speculative-num-steps", type=int, metavar="N", help="levels drafted (default: 5; MTP: 1)")
    group.add("--speculative-eagle-topk", type=int, metavar="N", help="children kept per drafted token (default: 4; MTP: 1)")
    group.add(
        "--speculative-num-draft-tokens",
        type=int,
        metavar="N",
        help="nodes verified at once, root included (default: 8; MTP: 2)",
    )
    group.add(
        "--speculative-token-map",
        metavar="FILE",
        help="FR-Spec's list of the tokens worth drafting (.pt, .json, .npy, .safetensors), for heads without their own",
    )
    group.add(
        "--speculative-config",
        metavar="JSON",
        help="vLLM's way to say the same: method (eagle, eagle3, mtp), model, num_speculative_tokens (the steps of a chain)",
    )


def _add_drafting(group: Group) -> None:
    group.add(
        "--speculative-adaptive",
        action="store_true",
        help="choose the tree, a chain or plain decoding for every cycle, by what was measured",
    )
    group.add(
        "--speculative-adaptive-trees",
        metavar="TREES",
        help='choose from these instead of a chain, as in "2/1/3 5/4/8" (`jaxspec bench speculative` finds them)',
    )
    group.add(
        "--speculative-request-trees",
        metavar="TREES",
        help='trees that single requests may ask for, as in "0 3/1/4"; 0 is plain decoding; none: none (default: 0)',
    )
    group.add(
        "--speculative-draft-window-size", type=int, metavar="N", help="the head sees the newest N tokens only (default: all)"
    )
    group.add(
        "--speculative-draft-sink-size",
        type=int,
        metavar="N",
        help=f"and, beside that window, the pages of the first N (default: {ENGINE.draft_sink_size})",
    )
    group.add(
        "--speculative-accept-threshold-single",
        type=float,
        metavar="P",
        help=f"{LOSSY}a draft is accepted if the target gives it the probability P (default: {ENGINE.accept_threshold_single})",
    )
    group.add(
        "--speculative-accept-threshold-acc",
        type=float,
        metavar="P",
        help=f"{LOSSY}the target's probabilities of drafts are divided by P (default: {ENGINE.accept_threshold_acc})",
    )


def _add_engine(group: Group) -> None:
    group.add(
        "--max-running-requests",
        "--max-num-seqs",
        type=int,
        metavar="N",
        help=f"requests that decode together (default: {ENGINE.max_running_requests})",
    )
    group.add(
        "--max-queued-requests",
        "--max-num-queued-reqs",
        type=int,
        default=MAX_QUEUED_REQUESTS,
        metavar="N",
        help="requests that wait, at most; further ones get status 503 (default: %(default)s)",
    )
    group.add(
        "--chunked-prefill-size",
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help=f"prompt tokens computed per step (default: {ENGINE.prefill_chunk})",
    )
    group.add("--page-size", "--block-size", type=int, metavar="N", help=f"tokens per cache page (default: {ENGINE.page_size})")
    group.add(
        "--attention-kernel",
        choices=ATTENTION_KERNELS,
        metavar="NAME",
        help=f"{', '.join(ATTENTION_KERNELS)} (default: pallas_triton on a GPU, else reference; mosaic needs a Hopper)",
    )
    group.add(
        "--max-total-tokens",
        type=int,
        metavar="N",
        help="size of the cache in tokens (default: all running requests at full length, or what fits)",
    )
    group.add(
        "--disable-radix-cache",
        "--no-enable-prefix-caching",
        action="store_true",
        help="no prefix cache: compute every prompt in full, even if it begins like an earlier one",
    )
    group.add(
        "--mem-fraction-static",
        "--mem-fraction",
        "--gpu-memory-utilization",
        type=float,
        metavar="X",
        help=f"share of a GPU's memory for weights and cache (default: {ENGINE.mem_fraction})",
    )
    group.add("--random-seed", "--seed", type=int, metavar="N", help=f"for requests without a seed (default: {ENGINE.random_seed})")


def _add_server(group: Group) -> None:
    group.add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add("--port", type=port, default=30000, metavar="N", help="port; 0: any free one (default: %(default)s)")
    group.add(
        "--api-key",
        metavar="KEY",
        help="what clients must send as a bearer token; better in the variable JAXSPEC_API_KEY, which other users can't read",
    )
    group.add(
        "--admin-api-key",
        metavar="KEY",
        help="another one, for what only the owner may do, such as /flush_cache; or JAXSPEC_ADMIN_API_KEY (default: --api-key)",
    )
    group.add("--no-tokenizer-info", action="store_true", help="close /tokenizer_info, which evaluation tools ask")
    group.add(
        "--request-timeout",
        type=positive_seconds,
        metavar="SECONDS",
        help="a request that takes longer, waiting included, ends with status 504 (default: none does)",
    )
    group.add(
        "--shutdown-timeout",
        type=seconds,
        default=ServerSettings.shutdown_timeout,
        metavar="SECONDS",
        help="for running requests to finish after SIGTERM (default: %(default)s); a second signal ends them at once",
    )
    group.add("--log-level", type=str.lower, choices=LOG_LEVELS, default="info", help="(default: %(default)s)")
    group.add("--config", metavar="FILE", help="YAML with any of these options, as in port: 8000; the command line wins")
    group.add("-h", "--help", action=_Help, nargs="?", metavar="WORD", help="this text, or the options that contain the word")
