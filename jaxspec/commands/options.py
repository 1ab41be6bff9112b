"""The options of the commands: one table, from which parsers, the engine's and the server's settings are made.

Names are SGLang's, with vLLM's and short ones beside them. Importing this loads no JAX, so that --help is instant.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jaxspec.checks import Whole, docstrings
from jaxspec.config import ATTENTION_KERNELS, FP8, KV_CACHE_DTYPES, MATMULS, EngineConfig
from jaxspec.engine.hosts import Hosts
from jaxspec.model_config import DTYPES, QUANTIZE_BY, QUANTIZED
from jaxspec.server.settings import ServerSettings, origins, positive_seconds, seconds
from jaxspec.text.answer_parser import REASONING_FORMATS
from jaxspec.text.tool_formats import TOOL_FORMATS
from jaxspec.tree_shape import TreeShape

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
MAX_QUEUED_REQUESTS = 1024
"""Default of --max-queued-requests: a server's queue must be bounded."""
CONFIGS: dict[str, type[Any]] = {"engine": EngineConfig, "server": ServerSettings, "hosts": Hosts}


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """An option's type: a whole number from `least` to `most`."""

    def number(text: str) -> int:
        try:
            return Whole(least, most).clean("", int(text) if re.fullmatch(r"\s*[+-]?\d{1,18}\s*", text) else text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).lstrip()) from None

    return number


def tree(text: str) -> TreeShape:
    """An option's type: a draft tree such as 5/4/8, or plain."""
    try:
        return TreeShape.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def kv_cache_dtype(name: str) -> str:
    """An option's type: one of KV_CACHE_DTYPES; vLLM calls fp8_e4m3 also fp8."""
    if name not in (*KV_CACHE_DTYPES, "fp8"):
        raise argparse.ArgumentTypeError(f"must be auto, which is the dtype of the weights (--dtype), or {FP8}, got {name[:80]!r}")
    return FP8 if name == "fp8" else name


def quantization(name: str) -> str:
    """An option's type: one of QUANTIZED."""
    if name not in QUANTIZED:
        raise argparse.ArgumentTypeError(f"{QUANTIZE_BY}, got {name[:80]!r}")
    return name


class Option(NamedTuple):
    """One option, whichever commands have it."""

    names: str
    """Its spellings, the first for messages, and what the help shows for its value, or VALUE... Without dashes: positional."""
    help: str = ""
    """Empty: the docstring of the field that it sets."""
    sets: str = ""
    """The field whose value it is: engine.FIELD of EngineConfig, server.FIELD of ServerSettings."""
    type: Callable[[str], Any] | None = None
    """None: the field's type, else text."""
    choices: Sequence[str] | None = None
    default: Any = None
    """None for fields: the field's own."""
    switch: bool | None = None
    """For options without a value: the value that they set."""
    needs: str = ""
    """What the option needs to have an effect: head, or drafts of any kind."""
    secret: str = ""
    """The variable that may hold the value instead. The value is never shown."""

    @property
    def flag(self) -> str:
        return self.names.split()[0]

    @property
    def spellings(self) -> list[str]:
        return [name for name in self.names.split() if not name.isupper()]

    @property
    def metavar(self) -> str | None:
        """How the help shows the value."""
        return next((name for name in self.names.split() if name.isupper()), None)

    @property
    def dest(self) -> str:
        """Its name in a namespace of argparse."""
        return self.flag.lstrip("-").replace("-", "_")

    @property
    def field(self) -> Any:
        """The declaration of the field that it sets; None: it sets none."""
        owner, _, name = self.sets.partition(".")
        return CONFIGS[owner].__dataclass_fields__[name] if self.sets else None

    @property
    def text(self) -> str:
        """Its help, with the default if there is one."""
        if self.sets and not self.help:
            return help_of(CONFIGS[self.sets.partition(".")[0]], self.field.name, self.default)
        default = self.field.default if self.sets and self.default is None and self.switch is None else self.default
        return self.help if default is None or "(default: " in self.help else f"{self.help} (default: {default})"

    def add_to(self, group: Any, **changes: Any) -> argparse.Action:
        """Makes a parser, or a section of one, take it."""
        settings: dict[str, Any] = {"help": self.text.replace("%", "%%")}  # argparse reads % as a format
        if self.switch is not None:
            settings["action"] = "store_true"
        else:
            number = next((kind for kind in (int, float) if self.sets and self.field.type in (kind, kind | None)), None)
            metavar = self.metavar or ("N" if number is int else "X" if number is float else None)
            settings |= {"type": self.type or number, "metavar": metavar, "choices": self.choices, "default": self.default}
            if self.sets.startswith(("server.", "hosts.")):
                settings["default"] = self.field.default
        if self.names.endswith("..."):
            settings |= {"nargs": "+", "metavar": self.names.split()[-1].removesuffix("...")}
        if not self.flag.startswith("-"):
            settings["nargs"] = "?"
        return group.add_argument(*self.spellings, **(settings | changes))


TABLE: dict[str, tuple[Option, ...]] = {
    "model": (
        Option("model_dir MODEL", "the same as --model-path"),
        Option("--model-path --model DIR", "a name on the Hub, a directory, a GGUF file, or smollm2 (default: the built-in model)"),
        Option("--tokenizer-path --tokenizer DIR", "must be the model's own directory: a separate tokenizer is not supported"),
        Option("--revision NAME", "branch, tag or commit of the model on the Hub (default: the newest)"),
        Option("--download-dir DIR", "where downloads go (default: the Hub's cache, see HF_HOME)"),
        Option("--served-model-name NAME...", "names of the model in the API (default: as given to --model-path)"),
        Option(
            "--dtype",
            "auto: on a CPU float32 (weights in the file's own bits), on a GPU float16 if the checkpoint is, else bfloat16",
            choices=("auto", *DTYPES),
            type=lambda name: "float16" if name == "half" else name,
            default="auto",
        ),
        Option("--quantization -q WHICH", "int8, fp8, int4: quantise while loading (default: as published)", type=quantization),
        Option("--context-length --max-model-len", sets="engine.context_length"),
        Option("--chat-template FILE", "a Jinja template, or chatml, llama-2, mistral, vicuna_v1.1 (default: the model's)"),
        Option("--tool-call-parser NAME", f"{', '.join(TOOL_FORMATS)} (default: the template's)", choices=tuple(TOOL_FORMATS)),
        Option("--reasoning-parser NAME", f"{', '.join(REASONING_FORMATS)} (default: none)", choices=tuple(REASONING_FORMATS)),
        Option(
            "--sampling-defaults --generation-config WHICH",
            "for requests to OpenAI's endpoints that omit sampling values: use the model's generation_config.json (model, auto) or "
            "neutral values (openai, vllm) (default: model)",
            choices=("model", "auto", "openai", "vllm"),
            default="model",
        ),
    ),
    "speculative decoding": (
        Option(
            "--speculative-algorithm --speculative-algo NAME",
            "EAGLE, EAGLE3, NEXTN, DFLASH, DSPARK, STANDALONE, NGRAM, NONE (default: the draft's)",
        ),
        Option(
            "--speculative-draft-model-path --speculative-draft-model --draft NAME",
            "a draft head or small model: its name on the Hub, or its directory; or ngram: drafts from the text (default: the head "
            "that comes with the model)",
        ),
        Option("--speculative-draft-model-revision NAME", "what --revision is for the model (default: the newest)", needs="head"),
        Option(
            "--tree S/K/D",
            "the tree, or plain; S/K/D/H: n-grams beside a head of H levels "
            "(default: 5/4/8; MTP 1/1/2; STANDALONE 3/1/4; NGRAM 7/4/8; DFLASH, DSPARK 7/4/16; on CPUs for SmolLM2, and without "
            "a head, the fastest of several)",
            type=tree,
        ),
        Option("--speculative-num-steps S", "its levels; 0: plain decoding", type=whole(0)),
        Option("--speculative-eagle-topk K", "children kept per drafted token", type=whole(0)),
        Option("--speculative-num-draft-tokens D", "nodes verified, with the root", type=whole(0)),
        Option(
            "--speculative-draft-model-quantization WHICH", "the head's (default: alike; smollm2's int8 on CPUs)", type=quantization
        ),
        Option("--speculative-token-map FILE", "FR-Spec's list of the tokens worth drafting (.pt, .json, .npy, .safetensors)"),
        Option("--speculative-config -sc JSON", "vLLM's: method (eagle3, dflash, ngram, ...), model, num_speculative_tokens, ..."),
        Option("--speculative-ngram", sets="engine.ngram", switch=True),
    ),
    "speculative decoding, advanced": (
        Option("--speculative-adaptive", sets="engine.adaptive", switch=True, needs="drafts"),
        Option(
            "--speculative-adaptive-trees TREES",
            'trees to choose from, as in "2/1/3 5/4/8"; `jaxspec bench speculative` finds them (default: a chain of three steps)',
            "engine.adaptive_trees",
            needs="drafts",
        ),
        Option(
            "--speculative-request-trees TREES",
            'trees that a request may choose, as in "0 3/1/4", where 0 is plain decoding; or none (default: 0)',
            "engine.request_trees",
            needs="drafts",
        ),
        Option("--speculative-draft-kv-cache-dtype NAME", sets="engine.draft_kv_cache_dtype", type=kv_cache_dtype, needs="head"),
        Option("--speculative-ngram-min-match-window-size", sets="engine.ngram_min_match"),
        Option("--speculative-ngram-max-match-window-size", sets="engine.ngram_max_match"),
        Option("--speculative-ngram-share MB", sets="engine.ngram_share"),
        Option("--speculative-draft-window-size", sets="engine.draft_window_size", needs="head"),
        Option("--speculative-draft-sink-size", sets="engine.draft_sink_size", needs="head"),
        Option("--speculative-row-cost", sets="engine.row_cost", needs="drafts"),
        Option("--speculative-accept-threshold-single", sets="engine.accept_threshold_single", needs="drafts"),
        Option("--speculative-accept-threshold-acc", sets="engine.accept_threshold_acc", needs="drafts"),
    ),
    "engine": (
        Option("--max-running-requests --max-num-seqs", sets="engine.max_running_requests"),
        Option(
            "--max-queued-requests --max-num-queued-reqs",
            "requests that wait, at most; further ones get status 503",
            "engine.max_waiting_requests",
            default=MAX_QUEUED_REQUESTS,
        ),
        Option("--chunked-prefill-size --max-num-batched-tokens", sets="engine.prefill_chunk"),
        Option("--page-size --block-size", sets="engine.page_size"),
        Option("--tp-size --tensor-parallel-size --tp -tp", sets="engine.tp_size"),
        Option(
            "--kv-cache-dtype NAME",
            "auto is the dtype of the weights; fp8_e4m3 stores keys and values in 8 bits, with the checkpoint's scales or none",
            "engine.kv_cache_dtype",
            type=kv_cache_dtype,
        ),
        Option(
            "--attention-kernel NAME",
            f"{', '.join(ATTENTION_KERNELS)}; mosaic needs a Hopper GPU (default: pallas_triton on a GPU, else ours or XLA)",
            "engine.attention_kernel",
            choices=ATTENTION_KERNELS,
        ),
        Option(
            "--matmul NAME",
            f"{', '.join(MATMULS)}: kernels of matrix products; auto: on CPUs the bundled ones if they are built, else XLA; "
            "skinny: for at most 16 rows one that adds up each row in one order",
            "engine.matmul",
            choices=MATMULS,
        ),
        Option(
            "--max-total-tokens",
            "size of the cache in tokens (default: all running requests at full length, or as many as fit)",
            "engine.num_pages",
        ),
        Option(
            "--disable-radix-cache --no-enable-prefix-caching",
            "no prefix cache: compute every prompt in full, even if an earlier one has the same beginning",
            "engine.prefix_cache",
            switch=False,
        ),
        Option("--disable-overlap-schedule --no-async-scheduling", "one cycle after another", "engine.overlap", switch=False),
        Option("--mem-fraction-static --mem-fraction --gpu-memory-utilization X", sets="engine.mem_fraction", type=float),
        Option(
            "--random-seed --seed",
            "where requests without a seed get theirs from (default: random at each start)",
            "engine.random_seed",
        ),
        Option(
            "--compile-ahead WHICH",
            "programs to compile before the server is ready: first, the largest of each kind (smaller ones compile in the "
            "background when needed), or all, for measurements (default: first on a CPU, all on a GPU)",
            choices=("first", "all"),
        ),
    ),
    "several hosts": (
        Option("--nnodes", sets="hosts.nnodes", type=whole(1)),
        Option("--node-rank", sets="hosts.node_rank", type=whole(0)),
        Option("--dist-init-addr ADDRESS", sets="hosts.dist_init_addr"),
    ),
    "server": (
        Option("--host HOST", "address to listen on", default="127.0.0.1"),
        Option("--port N", "port to listen on; 0 is any free one", type=whole(0, 65535), default=30000),
        Option(
            "--api-key KEY",
            "the key that clients must send as a bearer token; safer in the variable JAXSPEC_API_KEY, which other users can't read",
            "server.api_key",
            secret="JAXSPEC_API_KEY",
        ),
        Option(
            "--admin-api-key KEY",
            "the key for the owner's endpoints, such as /flush_cache; or JAXSPEC_ADMIN_API_KEY (default: --api-key)",
            "server.admin_api_key",
            secret="JAXSPEC_ADMIN_API_KEY",
        ),
        Option("--allowed-origins LIST", sets="server.allowed_origins", type=origins),
        Option("--strict-model-name", "refuse requests for a model of another name", "server.strict_model_name", switch=True),
        Option("--no-tokenizer-info", "close /tokenizer_info, which evaluation tools read", "server.tokenizer_info", switch=False),
        Option("--request-timeout SECONDS", sets="server.request_timeout", type=positive_seconds),
        Option("--shutdown-timeout SECONDS", sets="server.shutdown_timeout", type=seconds),
        Option("--dp-size --data-parallel-size --dp -dp N", "servers behind a router (fleet.md)", type=whole(1, 64), default=1),
        Option("--kv-events-config JSON", "vLLM's notation: tells routers what the prefix cache holds (fleet.md)"),
        Option("--log-level LEVEL", ", ".join(LOG_LEVELS), type=str.lower, choices=LOG_LEVELS, default="info"),
        Option("--config FILE", "YAML file with any of these options, as in `port: 8000`; the command line wins"),
    ),
}
"""The options of `jaxspec serve`, by their section in its help. Other commands take some of them."""
OPTIONS = {option.dest: option for section in TABLE.values() for option in section}
HEAD = tuple(
    f"speculative_{each}" for each in ("draft_model_path", "draft_model_revision", "token_map", "draft_model_quantization")
)
"""About the draft head or model."""
ENGINE = ("speculative_ngram", "kv_cache_dtype")
"""Options that change how an engine drafts and computes, for the commands that compare or show its texts."""
TREE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
FLAG_OF = {option.sets.removeprefix("engine."): option.flag for option in OPTIONS.values() if option.sets.startswith("engine.")}
"""The flag that sets a field of EngineConfig."""


class _Format(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the text around the options, and shows an option's value once, after all its spellings."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


class Parser(argparse.ArgumentParser):
    """Ends a wrong command line with one line and exit status 2."""

    def __init__(self, prog: str, description: str | None = None, epilog: str | None = None, **settings: Any):
        defaults: dict[str, Any] = {"usage": f"{prog} [options]", "formatter_class": _Format, "allow_abbrev": False}
        super().__init__(prog, description=description, epilog=epilog, **(defaults | settings))

    def add_options(self, section: str, *names: str) -> None:
        """A section with options of the table, by their `dest`. Directories and files are Paths."""
        group = self.add_argument_group(section)
        for name in names:
            OPTIONS[name].add_to(group, **({"type": Path} if OPTIONS[name].metavar in ("DIR", "FILE") else {}))

    @property
    def by_name(self) -> dict[str, argparse.Action]:
        """Every option, by each of its spellings."""
        return self._option_string_actions

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; names may have underscores. Unknown ones are reported without values, and with what was perhaps meant."""
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)  # of the options
        given = [re.sub(r"^--[a-z0-9_-]+(?=\Z|=)", lambda name: name[0].replace("_", "-"), word) for word in words[:end]]
        options, rest = self.parse_known_args([*given, *words[end:]], namespace)
        unknown = next((argument for argument in rest if argument.startswith("-") and argument in given), None)
        if unknown is not None:
            self.error(f"there is no option {self.with_suggestion(unknown.partition('=')[0])}")
        where = " behind --" if rest and rest[0] in words[end:] else ""
        return options if not rest else self.error(f"unexpected argument{where}: {rest[0]!r:.200}")

    def with_suggestion(self, name: str) -> str:
        """An unknown name, and what was perhaps meant.

        In:  --speculative-num-step
        Out: --speculative-num-step: did you mean --speculative-num-steps?
        """
        close = difflib.get_close_matches(name, self.by_name, 1, 0.8)
        return f"{name[:80]}: did you mean {close[0]}?" if close else name[:80]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def add_model_options(parser: Parser, *more: str) -> None:
    """Which model and head, and further options of the table."""
    parser.add_options("model", "model_path", *HEAD, "dtype", "quantization", "revision", "download_dir", *more)


def add_tree_options(parser: Parser) -> None:
    """The draft tree, in one word or in SGLang's three numbers."""
    parser.add_options("draft tree", "tree", *TREE)


def chosen_tree(options: argparse.Namespace) -> TreeShape | None:
    """The tree of `add_tree_options`, or None if none was given. Raises ValueError if two were, or the numbers don't fit."""
    parts = [vars(options)[name] for name in TREE]
    if parts == [None, None, None]:
        return options.tree
    if options.tree is not None:
        raise ValueError("give --tree or SGLang's three numbers, not both")
    return TreeShape(*parts)


def help_of(config: Any, field: str, default: Any = None) -> str:
    """The docstring of a dataclass's field as the help of an option.

    In:  "Longest sequence, in tokens. None: the model's own."
    Out: "longest sequence, in tokens (default: the model's own)"
    """
    text, _, unset = docstrings(config)[field].partition(" None: ")
    default = config.__dataclass_fields__[field].default if default is None else default
    shown = unset.rstrip(".") if default is None else "" if default is False or default == () else default
    return text[0].lower() + text[1:].rstrip(".") + (f" (default: {shown})" if shown != "" else "")
