"""Command line of `python -m convert` and `jaxspec convert`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

PROG = "jaxspec convert"
EXAMPLES = """examples:
  PROG Llama-3.1-8B-Instruct converted/llama --draft EAGLE3-LLaMA3.1-Instruct-8B --check
  PROG MiMo-7B-RL converted/mimo                      (with its MTP layer)
  PROG EAGLE-head converted/head --target Llama-3.1-8B-Instruct
  PROG EAGLE-LLaMA3-8B head --target Meta-Llama-3-8B-Instruct --token-map freq_32768.pt
  PROG converted/head exported --export speculators
  PROG --inspect EAGLE3-head --target Llama-3.1-8B-Instruct
  PROG --verify converted/llama"""


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Runs one command. The exit status is 0, 1 if a check fails, 2 if the command or a file is wrong, 130 after Ctrl-C."""
    parser = make_parser(prog)
    options = parser.parse_args(argv)
    _refuse_combinations(parser, options)
    from jaxspec.commands.common import run_guarded  # loads NumPy

    return run_guarded(prog, lambda: _interruptible(options, prog))


def _interruptible(options: argparse.Namespace, prog: str) -> int:
    """The command's exit status; after Ctrl-C it reports what was written."""
    try:
        return run(options)
    except KeyboardInterrupt:
        finished = options.output is not None and options.output.exists()  # it was being checked
        print(f"{prog}: interrupted; {options.output if finished else 'nothing'} was written", file=sys.stderr)
        return 130


def make_parser(prog: str = PROG) -> argparse.ArgumentParser:
    """Builds the parser; it loads no JAX, so --help is instant."""
    from jaxspec.commands.options import OPTIONS, Parser
    from jaxspec.model_config import DTYPES, QUANTIZATIONS

    about = "Convert models and draft heads to checkpoints that load faster; inspect, verify and export them."
    parser = Parser(prog, about, EXAMPLES.replace("PROG", prog), usage=f"{prog} SOURCE OUTPUT [options]")
    parser.add_argument("source", type=Path, nargs="?", help="a model or a head: its name on the Hub, directory or file")
    parser.add_argument("output", type=Path, nargs="?", help="the new directory; it must not exist")
    OPTIONS["revision"].add_to(
        parser, help="branch, tag or commit on the Hub of SOURCE, or of --inspect PATH (default: the newest)"
    )
    for name in ("speculative_draft_model_revision", "download_dir"):
        OPTIONS[name].add_to(parser)
    group = parser.add_argument_group("converting")
    group.add_argument("--draft", type=Path, metavar="HEAD", help="convert this draft head too, into OUTPUT/draft")
    group.add_argument("--target", type=Path, metavar="DIR", help="when SOURCE is a head: the target that it is for")
    group.add_argument("--token-map", type=Path, metavar="FILE", help="FR-Spec token map for the head")
    group.add_argument("--dtype", choices=DTYPES, help="cast the weights (default: keep their dtype)")
    group.add_argument(
        "--quantization", choices=QUANTIZATIONS, help="quantise the weights, those of the head too (default: as they are)"
    )
    group.add_argument("--check", action="store_true", help="load original and result, compare logits on random tokens")
    group = parser.add_argument_group("other commands")
    group.add_argument(
        "--export",
        choices=("huggingface", "safeailab", "sglang", "speculators", "mimo", "z-lab", "deepspec"),
        help="write SOURCE in this dialect instead (targets: huggingface, heads: the others)",
    )
    group.add_argument("--inspect", type=Path, metavar="PATH", help="describe a checkpoint; with --target, check that it fits")
    group.add_argument("--verify", type=Path, metavar="DIR", help="compare a converted checkpoint with its hashes")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser


def _refuse_combinations(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the process with status 2 if an option would have no effect."""
    of_conversion = [flag for flag in ("draft", "token_map", "dtype", "quantization", "check") if getattr(options, flag)]
    alone = options.inspect or options.verify
    if (alone and options.source) or (options.inspect and options.verify):
        parser.error("--inspect and --verify stand alone: leave out SOURCE, OUTPUT and the other command")
    if not alone and options.output is None:
        parser.error("give SOURCE and OUTPUT, or --inspect PATH, or --verify DIR")
    if (alone or options.export) and of_conversion:
        parser.error(f"--{of_conversion[0].replace('_', '-')} is for converting: leave it out")
    if options.export and alone:
        parser.error("--export writes SOURCE to OUTPUT: leave out --inspect and --verify")
    if options.target and (options.verify or options.export == "huggingface"):
        parser.error("--target is for heads: leave it out")
    if options.verify and options.revision:
        parser.error("--verify is for a directory here: leave out --revision")
    if options.speculative_draft_model_revision and not options.draft:
        parser.error("--speculative-draft-model-revision is for the HEAD of --draft; that of a SOURCE is --revision")
    if options.draft and options.target:
        parser.error("--draft is for a SOURCE that is a target, --target for a SOURCE that is a head: give one of them")


def run(options: argparse.Namespace) -> int:
    """Runs one command. Raises ValueError or OSError."""
    from convert import check, inspect
    from jaxspec.checkpoints.hub import HubOptions, local_path
    from jaxspec.defaults import model_directory

    hub = HubOptions(options.revision, options.download_dir, options.speculative_draft_model_revision)
    for name, where in {"source": hub, "inspect": hub, "draft": hub.of_draft, "target": hub.newest}.items():
        if vars(options)[name] is not None:
            setattr(options, name, model_directory(vars(options)[name], where))
    if options.token_map is not None:
        options.token_map = local_path(options.token_map, hub.newest)
    if options.inspect:
        print(inspect.describe(options.inspect, options.target))
        return 0
    if options.verify:
        wrong = check.check_hashes(options.verify, progress=not options.quiet)
        print("\n".join(wrong) or f"{options.verify} is intact: every file and parameter matches its hash")
        return 1 if wrong else 0
    if options.export:
        from convert.export import export_head, export_target

        if options.export == "huggingface":
            export_target(options.source, options.output, progress=not options.quiet)
        else:
            export_head(options.source, options.output, options.export, target=options.target, progress=not options.quiet)
        print(f"wrote {options.output} ({options.export})")
        return 0
    return _convert(options)


def _convert(options: argparse.Namespace) -> int:
    from convert import check
    from convert.converting import Options, convert_head, convert_target
    from jaxspec.checkpoints.loading import head_kind

    how = Options(options.dtype, options.quantization, progress=not options.quiet)
    if options.target:
        convert_head(options.source, options.output, options.target, how, token_map=options.token_map)
    else:
        convert_target(options.source, options.output, how, draft=options.draft, token_map=options.token_map)
    print(f"wrote {options.output}")
    if not options.check:
        return 0
    differences, bars = {}, not options.quiet
    if not options.target:
        differences["target"] = check.compare_targets(options.source, options.output, progress=bars)
    head = options.source if options.target or options.draft is None else options.draft
    if head_kind(head) is not None:
        target = options.target or options.output
        compared = check.compare_heads(head, options.output, target, token_map=options.token_map, progress=bars)
        differences["draft head"] = compared
    for name, difference in differences.items():
        print(f"{name}: {difference}")
    is_same = options.dtype is None and options.quantization is None
    return 1 if is_same and any(difference.largest for difference in differences.values()) else 0


if __name__ == "__main__":
    sys.exit(main(prog="python -m convert"))
