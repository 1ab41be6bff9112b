"""The command line of `jaxspec serve` and its --config file, checked. Importing this loads no JAX, so that --help is instant."""

import argparse
import os
import re
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from jaxspec.checkpoints.hub import HubOptions
from jaxspec.commands.common import CONVERTED, fields_given, in_flags
from jaxspec.commands.compat import FLAG as VLLM_FLAG
from jaxspec.commands.compat import TEXT_NAMES, SpeculativeConfig, add_ignored, list_ignored, parse_speculative_config
from jaxspec.commands.config_file import read_config
from jaxspec.commands.options import HEAD, OPTIONS, TABLE, TREE, Parser, chosen_tree
from jaxspec.config import EngineConfig
from jaxspec.defaults import FROM_TEXT, NGRAM, SMOLLM2
from jaxspec.engine.hosts import Hosts, group_key
from jaxspec.server.kv_events import KvEventsConfig, checked_config
from jaxspec.server.settings import ServerSettings
from jaxspec.text.chat_formats import CHAT_FORMATS
from jaxspec.tree_shape import NGRAM_TREE, PLAIN, TreeShape

PROG = "jaxspec serve"
DESCRIPTION = "Serve a model with speculative decoding. Without a model directory: the built-in model and its draft head."
EPILOG = """examples:
  jaxspec serve smollm2
  jaxspec serve meta-llama/Llama-3.1-8B-Instruct --draft yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
  jaxspec serve DIR --tree 3/1/4 --port 8000

--help=WORD shows only the options that contain the word, such as --help=cache. Options of SGLang and vLLM that have
no effect here, such as those of CUDA graphs, are accepted and reported in the log: --help=ignored lists them."""
ALGORITHMS = {
    "EAGLE": ("EAGLE", "MTP"),
    "EAGLE3": ("EAGLE3",),
    "NEXTN": ("MTP",),
    "DFLASH": ("DFLASH",),
    "DSPARK": ("DSPARK",),
    "STANDALONE": ("STANDALONE",),
    "NGRAM": (),
    "NONE": (),
}
"""SGLang's names, and the kinds of head (HeadConfig.algorithm) that each stands for."""
NOT_YET = ("UNO",)
_WINDOWS = ("speculative_ngram_min_match_window_size", "speculative_ngram_max_match_window_size")
_OF_DRAFTS = (
    *("tree", *TREE, "speculative_draft_model_path", "speculative_token_map", "speculative_draft_model_quantization"),
    *("speculative_ngram", "speculative_ngram_share", *_WINDOWS),
)
"""Options about the source of drafts and its tree. Loading the model checks whether they have an effect."""
_NEEDING = {option.dest: option.needs for option in OPTIONS.values() if option.needs}
_OF_HEADS = (*HEAD, *(name for name, needed in _NEEDING.items() if needed == "head"))
_VLLMS = ("speculative_algorithm", "speculative_draft_model_path", "tree", *TREE)
"""Options whose values --speculative-config always gives; _WINDOWS: those that it may give."""
_WANTING_DRAFTS = ("tree", *TREE, "speculative_ngram", "speculative_adaptive")
_SAYING_THE_SAME = (
    (("tree",), TREE),
    (TREE, ("tree",)),
    (("speculative_config",), (*_VLLMS, "speculative_draft_model_revision", *_WINDOWS)),
    (("speculative_draft_model_path",), ("speculative_config", "speculative_algorithm")),
    (("speculative_algorithm",), ("speculative_config",)),
)
"""Options of the command line, each group with the options of a config file that it overrides."""
_SAME_VALUE = {
    option.dest: option.field.name
    for option in OPTIONS.values()
    if option.sets.startswith("engine.") and option.switch is None and option.dest not in CONVERTED
}
"""Options whose value is that of a field of EngineConfig."""
_SWITCHES = tuple(option for option in OPTIONS.values() if option.sets.startswith("engine.") and option.switch is not None)
_UNSHOWN = (*(option.dest for option in OPTIONS.values() if option.secret), "config", "help", "model_dir")
"""Settings that clients don't see, even with the admin key."""


@dataclass(frozen=True)
class ServerArguments:
    """A checked command line."""

    prog: str
    """How the command was called, for errors."""
    model: str | None
    """None: the built-in model."""
    draft: str | None
    """None: the head that comes with the model, if there is one."""
    algorithm: str | None
    """One of ALGORITHMS, which the head must be. None: any."""
    token_map: str | None
    tree: TreeShape | None
    """None: the default of the model and head."""
    request_trees: tuple[TreeShape, ...] | None
    """None: plain decoding, if there is a head."""
    dtype: str
    quantization: str | None
    draft_quantization: str | None
    """None: as the target's."""
    engine: dict[str, Any]
    """Fields of EngineConfig that were given, or whose default differs in a server."""
    host: str
    port: int
    hub: HubOptions
    served_model_names: tuple[str, ...]
    chat_template: str | None
    """A name in CHAT_FORMATS, or a file that existed when the command line was read. None: the model's own."""
    tool_call_parser: str | None
    """A name in TOOL_FORMATS. None: what the chat template tells."""
    reasoning_parser: str | None
    """A name in REASONING_FORMATS. None: thinking is content."""
    model_sampling: bool
    """Requests to OpenAI's endpoints that leave sampling values out get those of the model's generation_config.json."""
    settings: ServerSettings = field(repr=False)
    """Holds secrets."""
    hosts: Hosts
    group_key: bytes | None = field(repr=False)
    """None: there is one process."""
    dp_size: int
    kv_events: KvEventsConfig
    compile_ahead: str | None
    """The programs to wait for, first or all. None: first on a CPU, all on a GPU."""
    log_level: str
    given: dict[str, Any]
    """Options that are not at their defaults, for the log; keys as ***."""
    head_flags: tuple[str, ...]
    """Flags that were given and mean nothing without a draft head."""
    notes: tuple[str, ...]
    """Flags without effect, and what happens instead, for the log."""
    warnings: tuple[str, ...]
    """Options with changed values, for the log."""

    @property
    def shows_progress(self) -> bool:
        return self.log_level in ("debug", "info")


def make_parser(word: str = "", prog: str = PROG) -> Parser:
    """The parser; with a word, of the options that contain it."""
    usage = f"{prog} [MODEL] [options]"
    parser = Parser(prog, None if word else DESCRIPTION, None if word else EPILOG, usage=usage, add_help=False)
    for section, options in TABLE.items():
        group = parser.add_argument_group(section)
        for option in options:
            if word.lower() in f"{option.names} {option.text}".lower():
                option.add_to(group)
    help_options = parser.add_argument_group("help")
    if not word:
        help_options.add_argument(
            "-h", "--help", action=_Help, nargs="?", metavar="WORD", help="show this text, or the options that contain the word"
        )
    add_ignored(parser)
    return parser


def help_text(word: str, prog: str = PROG) -> str:
    """The help; with a word, the options that contain it, those without effect too. "ignored": all of the latter."""
    if not word:
        return make_parser(prog=prog).format_help()
    ignored = list_ignored("" if word == "ignored" else word)
    shown = "" if word == "ignored" else make_parser(word).format_help().partition("\n\n")[2]  # without the usage
    parts = [shown.rstrip(), f"accepted without effect:\n{ignored}" if ignored else ""]
    return "\n\n".join(part for part in parts if part) or f"no option contains {word[:80]!r}"


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, _namespace: Any, word: Any, _name: str | None = None) -> NoReturn:
        try:
            print(help_text(word or "", parser.prog), flush=True)
        except BrokenPipeError:  # the reader, such as `head`, has closed it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        parser.exit()


def parse_arguments(
    argv: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ, prog: str = PROG
) -> ServerArguments:
    """The command line, with the config file that it names and the keys in the environment, checked.

    Ends the process with status 2 and one clear line if it is wrong.
    """
    parser = make_parser(prog=prog)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            options = _read(parser, list(sys.argv[1:] if argv is None else argv))
            given = {name: value for name, value in vars(options).items() if value != parser.get_default(name)}
            _check_paths(options)
            request_trees = _trees("--speculative-request-trees", options.speculative_request_trees)
            needing = {name: needed for name, needed in _NEEDING.items() if name in given}
            if request_trees == ():  # "none" needs nothing
                del needing["speculative_request_trees"]
            speculation = _speculation(options, given, needing)
            engine = {**_engine_fields(options), **speculation.engine}
            needing_head = [name for name, needed in needing.items() if needed == "head" or "ngram" not in engine]
            EngineConfig(**engine, request_trees=request_trees or ())
            hosts = Hosts(options.nnodes, options.node_rank, options.dist_init_addr)
            hosts.check_devices(engine.get("tp_size", EngineConfig.tp_size), options.dp_size)
            secret = group_key(environment) if hosts.nnodes > 1 else None
            kv_events = checked_config(options.kv_events_config, prefix_cache=not options.disable_radix_cache)
            keys = {option.dest: _key(option.dest, options, environment) for option in OPTIONS.values() if option.secret}
        except ValueError as error:
            parser.error(in_flags(str(error)))
    shown = {name: value for name, value in vars(options).items() if name != "ignored"}
    shown |= {name: "***" for name, key in keys.items() if key is not None}
    shown["tree"] = options.tree and options.tree.name
    in_use = {name: value for name, value in shown.items() if name not in _UNSHOWN}
    settings = ServerSettings(**fields_given(options, "server") | keys, shown=in_use)
    return ServerArguments(
        prog=prog,
        model=options.model_path,
        draft=speculation.draft,
        algorithm=speculation.algorithm,
        token_map=options.speculative_token_map,
        tree=speculation.tree,
        request_trees=request_trees,
        dtype=options.dtype,
        quantization=options.quantization,
        draft_quantization=options.speculative_draft_model_quantization,
        engine=engine,
        host=options.host,
        port=options.port,
        hub=HubOptions(options.revision, options.download_dir, speculation.revision or options.speculative_draft_model_revision),
        served_model_names=tuple(options.served_model_name or ()),
        chat_template=options.chat_template,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        model_sampling=options.sampling_defaults in ("model", "auto"),
        settings=settings,
        hosts=hosts,
        group_key=secret,
        dp_size=options.dp_size,
        kv_events=kv_events,
        compile_ahead=options.compile_ahead,
        log_level=options.log_level,
        given={name: value for name, value in shown.items() if value != parser.get_default(name)},
        head_flags=tuple(OPTIONS[name].flag for name in needing_head),
        notes=(*options.ignored, *speculation.notes),
        warnings=tuple(str(warning.message) for warning in caught),
    )


def _read(parser: Parser, argv: list[str]) -> argparse.Namespace:
    """The options of the command line and of the config file that it names; those of the command line win."""
    _refuse_second_key(argv)
    options = parser.parse_args(argv)
    model_dir = options.model_dir
    if model_dir is not None and options.model_path is not None:
        raise ValueError(f"the model was given twice: {model_dir!r:.200} and --model-path {options.model_path!r:.200}")
    if options.config is not None:
        in_file, told = read_config(Path(options.config), parser), options
        options = parser.parse_args([*in_file, f"--config={options.config}", *argv])  # an option ends a list at the end of the file
        vars(options).update({name: vars(told)[name] for name in _outdone(told, options)})
    options.model_path = model_dir or options.model_path
    options.model_dir = None
    return options


def _outdone(told: argparse.Namespace, both: argparse.Namespace) -> set[str]:
    """The options of a config file that the command line overrides. `told`: the command line; `both`: it and the file."""
    outdone = {each for names, others in _SAYING_THE_SAME if any(vars(told)[name] is not None for name in names) for each in others}
    algorithm = algorithm_of(told.speculative_algorithm)
    if algorithm == "NONE" or told.tree == PLAIN or told.speculative_num_steps == 0:
        outdone.update(("speculative_algorithm", "speculative_config", *_OF_DRAFTS, *_NEEDING))
    elif algorithm == NGRAM:
        outdone.update(_OF_HEADS)
    elif algorithm_of(both.speculative_algorithm) == "NONE" and any(vars(told)[name] for name in _WANTING_DRAFTS):
        outdone.add("speculative_algorithm")
    return outdone


def _refuse_second_key(argv: Sequence[str]) -> None:
    """vLLM's --api-key takes several keys, and ours one: a second one would be taken for the model's name, and be shown."""
    flags = [flag for option in OPTIONS.values() if option.secret for flag in option.spellings]
    for place, word in enumerate(argv):
        name, equals, _ = word.partition("=")
        behind = argv[place + (1 if equals else 2) :][:1]
        if name.replace("_", "-") not in flags or not behind or behind[0].startswith("-"):
            continue
        if behind[0] != SMOLLM2 and not os.path.exists(behind[0]):  # Path.exists raises for long texts
            raise ValueError(f"{name} takes one key, but a word follows it: remove it, or name the model before {name}")


def _speculation(options: argparse.Namespace, given: Collection[str], needing: Collection[str]) -> SpeculativeConfig:
    """The head and tree that were asked for, by our options, SGLang's or vLLM's."""
    if options.speculative_config is not None:
        config = parse_speculative_config(options.speculative_config)
        revision = ("speculative_draft_model_revision",) if config.revision else ()
        for name in (*_VLLMS, *revision, *(name for name in _WINDOWS if _SAME_VALUE[name] in config.engine)):
            if name in given:
                raise ValueError(f"{VLLM_FLAG} and {OPTIONS[name].flag} say the same: leave one of them out")
        return config
    algorithm = algorithm_of(options.speculative_algorithm)
    if algorithm in (None, NGRAM) and options.speculative_draft_model_path in TEXT_NAMES:
        algorithm, given = NGRAM, [name for name in given if name != "speculative_draft_model_path"]
    if algorithm == NGRAM:
        for name in HEAD:
            if name in given:
                raise ValueError(f"{OPTIONS[name].flag} is about a head, and {NGRAM} has none; --speculative-ngram merges both")
        return SpeculativeConfig(NGRAM, FROM_TEXT, _tree_of_nodes(options, NGRAM_TREE.topk), engine={"ngram": True})
    if algorithm in ("DFLASH", "DSPARK"):
        return SpeculativeConfig(algorithm, options.speculative_draft_model_path, _tree_of_nodes(options, 1))
    if algorithm != "NONE":
        return SpeculativeConfig(algorithm, options.speculative_draft_model_path, chosen_tree(options))
    for name in (*_OF_DRAFTS, *needing):
        if name in given:
            raise ValueError(f"{OPTIONS[name].flag} can't be combined with --speculative-algorithm NONE: leave one of them out")
    return SpeculativeConfig(algorithm, None, PLAIN)


def _tree_of_nodes(options: argparse.Namespace, topk: int) -> TreeShape | None:
    """The tree for drafters whose depth costs nothing: as in SGLang, the number of nodes is enough. `topk`: the default."""
    nodes = options.speculative_num_draft_tokens
    if options.speculative_num_steps is not None or options.tree is not None or nodes is None or nodes < 2:
        return chosen_tree(options)
    return TreeShape(nodes - 1, options.speculative_eagle_topk or topk, nodes)


def algorithm_of(name: str | None) -> str | None:
    """One of ALGORITHMS, or None if not given. Raises ValueError for other names."""
    if name is None or name.upper() in ALGORITHMS:
        return name and name.upper()
    if name.upper() in NOT_YET:
        raise ValueError(f"--speculative-algorithm {name.upper()} is not supported yet; supported: {', '.join(ALGORITHMS)}")
    raise ValueError(f"--speculative-algorithm must be one of {', '.join(ALGORITHMS)}, got {name[:80]!r}")


def _trees(flag: str, text: str | None) -> tuple[TreeShape, ...] | None:
    """The trees that a flag lists; None if it was not given.

    In:  "0 3/1/4"
    Out: (TreeShape(num_steps=0), TreeShape(3, 1, 4))
    """
    if text is None or text.strip().lower() == "none":
        return None if text is None else ()
    try:
        return tuple(dict.fromkeys(map(TreeShape.of, re.split(r"[\s,]+", text.strip()))))
    except ValueError as error:
        raise ValueError(f'{flag} must be none, or trees as in "0 3/1/4": {error}') from None


def _engine_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineConfig, as far as they were given or the server's default differs."""
    # Servers of one model must not repeat each other's samples, nor one its own after a restart.
    fields = {"random_seed": None, **fields_given(options, "engine")}
    if trees := _trees("--speculative-adaptive-trees", options.speculative_adaptive_trees):
        fields["adaptive_trees"] = trees
    if options.max_total_tokens is not None:
        page_size = max(1, fields.get("page_size", EngineConfig.page_size))
        if options.max_total_tokens < page_size:
            raise ValueError(f"--max-total-tokens must be at least one page, {page_size} tokens, got {options.max_total_tokens}")
        fields["num_pages"] = options.max_total_tokens // page_size
    return fields


def _check_paths(options: argparse.Namespace) -> None:
    """Finds out now what would otherwise fail when the model is loaded."""
    template, tokenizer = options.chat_template, options.tokenizer_path
    if template is not None and template not in CHAT_FORMATS and not Path(template).is_file():
        known = ", ".join(CHAT_FORMATS)
        raise ValueError(f"--chat-template must be a file or one of {known}, and {template!r:.200} is neither")
    if tokenizer is not None and (options.model_path is None or Path(tokenizer).resolve() != Path(options.model_path).resolve()):
        raise ValueError("--tokenizer-path must be the model's own directory: another tokenizer is not supported")


def _key(name: str, options: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    """A secret: the option's value, else that of its variable. Messages never show it."""
    key, source = vars(options)[name], OPTIONS[name].flag
    if key is None:
        key, source = environment.get(OPTIONS[name].secret), OPTIONS[name].secret
    if key is not None and not re.fullmatch(r"[!-~]{1,1000}", key):
        raise ValueError(f"{source} must be 1 to 1000 letters, digits and other visible ASCII characters, without spaces")
    return key


def settings_in_use(config: EngineConfig) -> dict[str, Any]:
    """The engine's settings by the names of their options, defaults too."""
    switched = {option.dest: vars(config)[option.field.name] is option.switch for option in _SWITCHES}
    return {flag: vars(config)[name] for flag, name in _SAME_VALUE.items()} | switched
