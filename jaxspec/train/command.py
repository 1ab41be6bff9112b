"""`jaxspec train`: heads for your own model. `data` lets the model write text to learn from, `head` trains one, `run` does both."""

import argparse
import hashlib
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from jaxspec.checkpoints.hub import HubOptions
from jaxspec.commands.common import run_guarded
from jaxspec.commands.options import OPTIONS, Parser, help_of, whole
from jaxspec.train.settings import DataSettings, TrainSettings
from jaxspec.tree_shape import PLAIN, TreeShape

if TYPE_CHECKING:
    from jaxspec.load import LoadedModels

PROG = "jaxspec train"
GOES_ON = "An interrupted command goes on when it is called again with the same options."
EXAMPLES = {
    "data": "example:\n  jaxspec train data --model-path M --data DATA --prompts chats.jsonl    (answers to your prompts)",
    "head": "example:\n  jaxspec train head --model-path M --data DATA --out HEAD",
    "run": "example:\n  jaxspec train run --model-path smollm2 --out HEAD    (data, head and card, without data of your own)",
}
COMMANDS = {
    "run": "let the model write text and train a draft head from it: data, then head",
    "data": "let the model write conversations to learn from",
    "head": "train a head from conversations",
}
TREES = ("3/1/4", "5/4/8", "5/4/16")
EVALUATED_TREE = TreeShape(5, 4, 8)
TEMPERATURES = (0.0, 1.0)
EVALUATED_TOKENS = 64


def make_parser(command: str) -> Parser:
    """The parser of one of COMMANDS. Loads no JAX: --help is instant."""
    about, example = COMMANDS[command], f"{EXAMPLES[command]}\n\n{GOES_ON}"
    parser = Parser(
        f"{PROG} {command}", f"{about[0].upper()}{about[1:]}.", example, usage=f"{PROG} {command} --model-path NAME [options]"
    )
    parser.set_defaults(command=command)
    parser.add_argument("--model-path", "--model", required=True, metavar="NAME", help="the target, as for jaxspec serve")
    for name in ("revision", "download_dir"):
        OPTIONS[name].add_to(parser)
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of the conversations (default: WORK/data)")
    parser.add_argument("--work", type=Path, metavar="DIR", help="folder of the run: checkpoints and log.jsonl (default: OUT.work)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the head goes, with its card")
    if command != "head":
        add_data_options(parser)
    add_settings(parser, ("length",) if command == "data" else [field.name for field in fields(TrainSettings)])
    return parser


def add_data_options(parser: Parser) -> None:
    """What the model writes."""
    add = parser.add_argument_group("data").add_argument
    add(
        "--prompts",
        metavar="FILE",
        help="JSONL or text with prompts; topics: made from templates (default: the model invents them)",
    )
    add("--shards", type=whole(1), default=8, metavar="N", help="of 128 conversations each (default: %(default)s)")
    add("--data-seed", type=whole(0), default=0, metavar="N", help="another one gives other conversations (default: %(default)s)")
    add("--batch-size", type=whole(1), default=64, metavar="N", help="conversations at once (default: %(default)s)")


def add_settings(parser: Parser, names: Collection[str]) -> None:
    add = parser.add_argument_group("head").add_argument
    for field in fields(TrainSettings):
        if field.name not in names:
            continue
        kind = field.type if isinstance(field.type, type) else str if field.type == str | None else int
        flag, shown = f"--{field.name.replace('_', '-')}", "NAME" if kind is str else "X" if kind is float else "N"
        about = help_of(TrainSettings, field.name, field.default)
        add(flag, type=kind, default=field.default, metavar=shown, help=about.replace("%", "%%"))


def overview() -> str:
    lines = [f"usage: {PROG} {{{','.join(COMMANDS)}}} --model-path NAME [options]", "", "commands:"]
    lines += [f"  {name:<5} {about}" for name, about in COMMANDS.items()]
    lines += ["", EXAMPLES["run"], "", f"`{PROG} COMMAND --help` lists the options of a command. {GOES_ON}"]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0
    if arguments[0] not in COMMANDS:
        print(f"{PROG}: error: expected one of {', '.join(COMMANDS)}, got {arguments[0][:80]!r}", file=sys.stderr)
        return 2
    parser = make_parser(arguments[0])
    options = parser.parse_args(arguments[1:])
    if options.work is None and options.out is not None:
        options.work = options.out.parent / f"{options.out.name}.work"
    needed = {"data": ("data",), "head": ("data", "out"), "run": ("out",)}[options.command]
    if missing := [f"--{name}" for name in needed if vars(options)[name] is None and not (name == "data" and options.work)]:
        parser.error(f"{options.command} needs {' and '.join(missing)}")
    return run_guarded(parser.prog, lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Raises ValueError or OSError."""
    from jaxspec.checkpoints.loading import target_model_config
    from jaxspec.defaults import model_directory
    from jaxspec.load import load_models

    data = options.data or options.work / "data"
    if options.work is not None and data.resolve() == options.work.resolve():
        raise ValueError(f"--data and --work are both {data}, and each has a settings.json of its own: give two folders")
    settings = TrainSettings(**{field.name: vars(options)[field.name] for field in fields(TrainSettings) if field.name in options})
    needed = ["optax"] if options.command == "data" else ["optax", "tensorboardX"]
    if missing := [package for package in needed if find_spec(package) is None]:
        names, verb = " and ".join(missing), "is" if len(missing) == 1 else "are"
        raise ValueError(f"{PROG} needs {names}, which {verb} not installed: pip install 'jaxspec-llm[train]'")
    if options.out is not None and os.path.lexists(options.out):
        raise ValueError(f"{options.out} exists already: give a new directory")
    if options.command != "data" and settings.length <= EVALUATED_TOKENS:
        raise ValueError(f"--length must be more than the {EVALUATED_TOKENS} tokens of an evaluation, got {settings.length}")
    hub = HubOptions(options.revision, options.download_dir)
    if settings.begin is not None:
        settings = replace(settings, begin=str(model_directory(settings.begin, hub.newest)))
    context = min(settings.length, target_model_config(model_directory(options.model_path, hub)).max_position_embeddings)
    batch = options.batch_size if options.command != "head" else 1
    how = {"progress": False, "max_running_requests": batch, "context_length": context, **hub._asdict()}
    models = load_models(options.model_path, tree=PLAIN, **how)
    if options.command != "head":
        write_data(options, models, data)
    if options.command != "data":
        train(options, settings, models, data)
    return 0


def write_data(options: argparse.Namespace, models: "LoadedModels", data: Path) -> None:
    """The shards that are missing."""
    from jaxspec.train.conversations import TOPICS, read_prompts, topic_prompts, write_shards
    from jaxspec.train.head import begun_run

    made = options.prompts == "topics"
    file = TOPICS if made else None if options.prompts is None else Path(options.prompts)
    digest = None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
    settings = DataSettings(named(options), digest, seed=options.data_seed, max_tokens=models.engine.context_length)
    if file is None:
        prompts, count = None, options.shards
    else:
        prompts = topic_prompts(options.shards * settings.per_shard, settings.seed, settings) if made else read_prompts(file)
        count = min(options.shards, -(-len(prompts) // settings.per_shard))
    begun = begun_run(options.work) if options.command == "run" else None
    known = count if begun is None else begun.get("shards", count)
    if count > known:
        raise ValueError(f"{options.work} holds a run on {known} shards: give --shards {known}, or another folder")
    write_shards(models, settings, prompts, data, count)


def train(options: argparse.Namespace, settings: TrainSettings, models: "LoadedModels", data: Path) -> None:
    """Trains a head. The one with the best mean of greedy and sampled accept lengths is written to `out`, with its card."""
    from tensorboardX import SummaryWriter

    from jaxspec.checkpoints.loading import load_head
    from jaxspec.train.evaluation import Trial, accept_lengths, card, curves, texts_agree
    from jaxspec.train.head import Trainer, describe

    trainer = Trainer(settings, models.target, models.directory, data, options.work)
    trainer.resume()
    print(f"{describe(trainer.head.config, trainer.params)}; {trainer.describe_data()}", flush=True)
    trial = Trial.of(trainer.parts.heldout, settings.eval_prompts, EVALUATED_TOKENS, models.engine.context_length)
    with SummaryWriter(str(options.work)) as board:
        for entry in trainer.run():
            found = accept_lengths(models.target, trainer.trained(), models.tokenizer, trial, EVALUATED_TREE, TEMPERATURES)
            entry["accept_lengths"], heldout = [round(each, 4) for each in found], entry["heldout"]
            length = sum(found) / len(found)
            said = " and ".join(f"{each:.2f} at temperature {at:g}" for each, at in zip(found, TEMPERATURES, strict=True))
            known = {"loss": entry["train_loss"], "held out": heldout["loss"], "right drafts": heldout["accuracy"]}
            losses = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
            left = "" if entry["seconds_left"] is None else f", {entry['seconds_left']} s left"
            print(f"step {entry['step']}: {losses}, accept length {said} with {EVALUATED_TREE.name}{left}", flush=True)
            trainer.keep_best(entry["step"], length)
            for name, value in curves(entry, length).items():
                board.add_scalar(name, value, entry["step"])
    best = load_head(trainer.best, models.target)
    lengths: dict[tuple[str, float], float] = {}
    for tree in TREES:
        found = accept_lengths(models.target, best, models.tokenizer, trial, TreeShape.of(tree), TEMPERATURES)
        lengths |= {(tree, temperature): length for temperature, length in zip(TEMPERATURES, found, strict=True)}
    same = texts_agree(models.target, best, models.tokenizer, trial, EVALUATED_TREE)
    facts = {
        "head": describe(best.config, trainer.params),
        "data": trainer.describe_data(),
        "training": f"{settings.steps} steps of {settings.rows} rows x {settings.length} tokens, {settings.levels} drafts deep",
        "evaluated on": f"{len(trial.prompts)} held-out prompts x {trial.max_tokens} tokens",
        "equal to plain decoding": f"{same} of {len(trial.prompts)} greedy texts",
    }
    text = card(named(options), facts, lengths)
    trainer.write_best(options.out, text)
    revision = f" --revision {options.revision}" if options.revision else ""
    print(f"{text}\nwrote {options.out}: jaxspec serve --model-path {options.model_path}{revision} --draft {options.out}")


def named(options: argparse.Namespace) -> str:
    """The target as data and card call it.

    In:  --model-path org/name --revision v2
    Out: org/name@v2
    """
    return f"{options.model_path}@{options.revision}" if options.revision else options.model_path
