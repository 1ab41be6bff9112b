"""jaxspec pull: downloads a model or a draft head from the Hub, once its config shows that jaxspec can load it."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxspec.checkpoints.hub import HubOptions, is_hub_name, local_path
from jaxspec.checkpoints.json_files import read_config
from jaxspec.checkpoints.kinds import algorithm_of, usual_tensors
from jaxspec.commands.common import run_guarded
from jaxspec.commands.models import kind_of, size_of
from jaxspec.commands.options import OPTIONS, Parser
from jaxspec.defaults import SMOLLM2, smollm2_file, unknown_model
from jaxspec.engine.memory import readable
from jaxspec.models.families import target_config
from jaxspec.server.logs import configure_logging

EXAMPLES = """examples:
  jaxspec pull Qwen/Qwen3-8B
  jaxspec pull AngelSlim/Qwen3-8B_eagle3
  jaxspec pull org/name/model-Q8_0.gguf"""


def make_parser() -> Parser:
    """Loads no JAX: --help is instant."""
    about = "Download a model or a draft head from the Hugging Face Hub. Its config is read first: what can't be loaded is refused."
    parser = Parser("jaxspec pull", about, EXAMPLES, usage="jaxspec pull NAME [options]")
    parser.add_argument("name", metavar="NAME", help="a name on the Hub, or of one GGUF file there")
    for name in ("revision", "download_dir"):
        OPTIONS[name].add_to(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 2 if there is no such model, it can't be loaded, or the Hub or the disk refuses; 130 after Ctrl-C."""
    options = make_parser().parse_args(argv)
    configure_logging("info")
    return run_guarded("jaxspec pull", lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Downloads, and prints where to and how to serve it. Raises ValueError or OSError."""
    name, hub = options.name, HubOptions(options.revision, options.download_dir)
    if not is_hub_name(name):
        is_here = Path(name).exists() or (name == SMOLLM2 and smollm2_file() is not None)
        raise ValueError(f"{name} is on this machine already" if is_here else unknown_model(name))
    if name.endswith(".gguf"):
        path = local_path(name, hub)
        kind, size = "GGUF file", path.stat().st_size
    else:
        check(local_path(name, hub, weights=False))
        path = local_path(name, hub)
        kind, size = kind_of(path), size_of(path)
    print(f"{name}: {kind}, {readable(size)} in {path}")
    where = f" --download-dir {hub.download_dir}" if hub.download_dir else ""
    is_head = kind.endswith(" head") and " target" not in kind
    flag = "--speculative-draft-model-revision" if is_head else "--revision"
    revision = f" {flag} {hub.revision}" if hub.revision else ""
    what = f"MODEL --draft {name}" if is_head else name
    print(f"serve it: jaxspec serve {what}{revision}{where}")
    return 0


def check(folder: Path) -> None:
    """Raises ValueError if the config describes a target that can't be loaded. Heads pass: checking one needs its target."""
    config = read_config(folder)
    if algorithm_of(usual_tensors(config)) not in ("EAGLE", "MTP"):
        return
    from jaxspec.checkpoints.quantization import read_scheme  # loads JAX
    from jaxspec.checkpoints.tensor_files import errors_named

    with errors_named(folder):
        target_config(config)
        read_scheme(config)
