"""The command line of the server, checked. Importing this loads neither JAX nor transformers: --help is instant."""

import argparse
import os
import re
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.config import PLAIN, EngineConfig, SpecConfig
from jaxspec.server.argument_groups import make_parser
from jaxspec.server.config_file import read_config
from jaxspec.server.parser import Parser
from jaxspec.server.settings import ServerSettings
from jaxspec.server.speculative_config import FLAG as VLLM_FLAG
from jaxspec.server.speculative_config import parse_speculative_config

ALGORITHMS = {"EAGLE": ("EAGLE", "MTP"), "EAGLE3": ("EAGLE3",), "NEXTN": ("MTP",), "NONE": ()}
"""SGLang's names, and the kinds of head (HeadConfig.algorithm) that each stands for."""
NOT_YET = ("STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO")
_FLAGS = {
    "context_length": "context_length",
    "page_size": "page_size",
    "attention_kernel": "attention_kernel",
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
_OTHER_FLAGS = {
    "num_pages": "max_total_tokens",
    "request_trees": "speculative_request_trees",
    "adaptive_trees": "speculative_adaptive_trees",
}
"""As above, but the value becomes another one."""
_TREE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
_TREE_FLAGS = ("speculative_draft_model_path", *_TREE, "speculative_token_map")
"""The model's loading tells if these have no use."""
HEAD_FLAGS = (
    "speculative_adaptive",
    "speculative_adaptive_trees",
    "speculative_request_trees",
    "speculative_draft_window_size",
    "speculative_draft_sink_size",
    "speculative_accept_threshold_single",
    "speculative_accept_threshold_acc",
)
"""Flags that mean nothing without a draft head either."""
_SECRET = {"api_key": "JAXSPEC_API_KEY", "admin_api_key": "JAXSPEC_ADMIN_API_KEY"}
"""Flags whose values are never shown, and the variables that may hold them instead."""
_UNSHOWN = (*_SECRET, "config", "help", "model_dir")
"""What clients don't see, even with the admin key."""


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
    request_trees: tuple[SpecConfig, ...] | None
    """None: plain decoding, if there is a head."""
    dtype: str
    engine: dict[str, Any]
    """Fields of EngineConfig that were given."""
    host: str
    port: int
    served_model_name: str | None
    chat_template: Path | None
    """A file that was there when the command line was read. None: the model's own."""
    settings: ServerSettings = field(repr=False)
    """Holds secrets."""
    log_level: str
    given: dict[str, Any]
    """Flags that are not at their defaults, for the log; keys as ***."""
    head_flags: tuple[str, ...]
    """Flags that were given and mean nothing without a draft head."""
    notes: tuple[str, ...]
    """What happens instead of what was asked for and has no effect, for the log."""
    warnings: tuple[str, ...]
    """What was changed, for the log."""

    @property
    def shows_progress(self) -> bool:
        """Whether progress belongs to what the owner wants to read."""
        return self.log_level in ("debug", "info")


def parse_arguments(argv: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> ServerArguments:
    """The command line, with the config file that it names and the keys in the environment, checked.

    Ends the process with status 2 and one clear line if it is wrong.
    """
    parser = make_parser()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            options = _read(parser, list(sys.argv[1:] if argv is None else argv))
            given = {name: value for name, value in vars(options).items() if value != parser.get_default(name)}
            _check_paths(options)
            request_trees = _trees("--speculative-request-trees", options.speculative_request_trees)
            needing_head = [name for name in HEAD_FLAGS if name in given]
            if request_trees == ():  # "none" needs nothing
                needing_head.remove("speculative_request_trees")
            speculation = _speculation(options, given, needing_head)
            engine = _engine_fields(options)
            EngineConfig(**engine, request_trees=request_trees or ())
            keys = {name: _key(name, variable, options, environment) for name, variable in _SECRET.items()}
        except ValueError as error:
            parser.error(in_flags(str(error)))
    shown = {name: value for name, value in vars(options).items() if name != "ignored"}
    shown |= {name: "***" for name, key in keys.items() if key is not None}
    settings = ServerSettings(
        **keys,
        shutdown_timeout=options.shutdown_timeout,
        request_timeout=options.request_timeout,
        tokenizer_info=not options.no_tokenizer_info,
        shown={name: value for name, value in shown.items() if name not in _UNSHOWN},
    )
    return ServerArguments(
        model=options.model_path,
        draft=speculation.draft,
        algorithm=speculation.algorithm,
        token_map=options.speculative_token_map,
        spec=speculation.spec,
        request_trees=request_trees,
        dtype=options.dtype,
        engine=engine,
        host=options.host,
        port=options.port,
        served_model_name=options.served_model_name,
        chat_template=None if options.chat_template is None else Path(options.chat_template),
        settings=settings,
        log_level=options.log_level,
        given={name: value for name, value in shown.items() if value != parser.get_default(name)},
        head_flags=tuple(map(_flag, needing_head)),
        notes=options.ignored,
        warnings=tuple(str(warning.message) for warning in caught),
    )


def _read(parser: Parser, argv: list[str]) -> argparse.Namespace:
    """The options of the command line and of the config file that it names; those of the command line win."""
    options = parser.parse_all(argv)
    if options.model_dir is not None and options.model_path is not None:
        raise ValueError(f"the model was given twice: {options.model_dir!r:.200} and --model-path {options.model_path!r:.200}")
    if options.config is not None:
        model_dir = options.model_dir
        options = parser.parse_all([*read_config(Path(options.config), parser), *argv])
        options.model_path = model_dir or options.model_path
    else:
        options.model_path = options.model_dir or options.model_path
    options.model_dir = None
    return options


class _Speculation(NamedTuple):
    algorithm: str | None
    draft: str | None
    spec: SpecConfig | None


def _speculation(options: argparse.Namespace, given: Collection[str], needing_head: Sequence[str]) -> _Speculation:
    """Which head and tree, in SGLang's words or in vLLM's."""
    if options.speculative_config is not None:
        for name in ("speculative_algorithm", "speculative_draft_model_path", *_TREE):
            if name in given:
                raise ValueError(f"{VLLM_FLAG} and {_flag(name)} say the same: leave one of them out")
        return _Speculation(*parse_speculative_config(options.speculative_config))
    algorithm = _algorithm(options.speculative_algorithm)
    tree = [vars(options)[name] for name in _TREE]
    if algorithm != "NONE":
        return _Speculation(algorithm, options.speculative_draft_model_path, None if tree == [None] * 3 else SpecConfig(*tree))
    for name in (*_TREE_FLAGS, *needing_head):
        if name in given:
            raise ValueError(f"{_flag(name)} has no use with --speculative-algorithm NONE: leave one of them out")
    return _Speculation(algorithm, None, PLAIN)


def _algorithm(name: str | None) -> str | None:
    """One of ALGORITHMS, or None if not given."""
    if name is None or name.upper() in ALGORITHMS:
        return name and name.upper()
    if name.upper() in NOT_YET:
        raise ValueError(f"--speculative-algorithm {name.upper()} is not there yet; there is: {', '.join(ALGORITHMS)}")
    raise ValueError(f"--speculative-algorithm must be one of {', '.join(ALGORITHMS)}, got {name[:80]!r}")


def _trees(flag: str, text: str | None) -> tuple[SpecConfig, ...] | None:
    """The trees that a flag lists; None if it was not given.

    In:  "0 3/1/4"
    Out: (SpecConfig(num_steps=0), SpecConfig(3, 1, 4))
    """
    if text is None or text.strip().lower() == "none":
        return None if text is None else ()
    trees = re.split(r"[\s,]+", text.strip())
    for tree in trees:
        if not re.fullmatch(r"0|\d{1,4}/\d{1,4}/\d{1,4}", tree):
            raise ValueError(f'{flag} must be none, or trees as in "0 3/1/4"; got {tree[:80]!r}')
    return tuple(dict.fromkeys(SpecConfig(*map(int, tree.split("/"))) for tree in trees))


def _engine_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineConfig, as far as they were given or the server's default differs."""
    fields = {name: value for name, flag in _FLAGS.items() if (value := vars(options)[flag]) is not None}
    if options.disable_radix_cache:
        fields["prefix_cache"] = False
    if options.speculative_adaptive:
        fields["adaptive"] = True
    if trees := _trees("--speculative-adaptive-trees", options.speculative_adaptive_trees):
        fields["adaptive_trees"] = trees
    if options.max_total_tokens is not None:
        page_size = max(1, fields.get("page_size", EngineConfig.page_size))
        if options.max_total_tokens < page_size:
            raise ValueError(f"--max-total-tokens must be at least one page, {page_size} tokens, got {options.max_total_tokens}")
        fields["num_pages"] = options.max_total_tokens // page_size
    return fields


def _check_paths(options: argparse.Namespace) -> None:
    """What is only read when the model is loaded must not be found missing then."""
    template, tokenizer = options.chat_template, options.tokenizer_path
    if template is not None and not Path(template).is_file():
        raise ValueError(f"--chat-template must be a file, and {template!r:.200} is none")
    if tokenizer is not None and (options.model_path is None or Path(tokenizer).resolve() != Path(options.model_path).resolve()):
        raise ValueError("--tokenizer-path must be the model's own directory: another tokenizer is not supported")


def _key(name: str, variable: str, options: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    """A secret: the flag's value, else the environment's. Messages never show it."""
    key, source = vars(options)[name], _flag(name)
    if key is None:
        key, source = environment.get(variable), variable
    if key is not None and not re.fullmatch(r"[!-~]{1,1000}", key):
        raise ValueError(f"{source} must be 1 to 1000 letters, digits and other visible ASCII characters, without spaces")
    return key


def settings_in_use(config: EngineConfig) -> dict[str, Any]:
    """The engine's settings by the names of their flags, defaults too."""
    return {flag: vars(config)[name] for name, flag in _FLAGS.items()}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def in_flags(message: str, only: Collection[str] = (*_FLAGS, *_OTHER_FLAGS)) -> str:
    """A message of the engine in the words of the command line; SpecConfig's words are the ends of its flags' names.

    In:  "prefill_chunk must be at least 1, got 0"
    Out: "--chunked-prefill-size must be at least 1, got 0"
    """
    flags = {name: _flag(flag) for name, flag in (_FLAGS | _OTHER_FLAGS).items() if name in only}
    return re.sub(r"[a-z]+(_[a-z]+)+", lambda word: flags.get(word[0], word[0]), message)
