"""Command line of `python -m convert`."""

import argparse
import sys
from pathlib import Path

from convert.inspect import describe, fits


def main(arguments: list[str] | None = None) -> int:
    """Prints what a checkpoint is. Exit status 2: it can't be read, or the head does not fit the target."""
    parser = argparse.ArgumentParser(
        prog="python -m convert",
        description="Says what a checkpoint directory is: target or head, sizes, layout, parameters, tensors.",
        epilog="example: python -m convert --inspect heads/eagle3 --target models/llama",
    )
    parser.add_argument("--inspect", type=Path, metavar="DIR", required=True, help="the checkpoint to describe")
    parser.add_argument("--target", type=Path, metavar="DIR", help="for a head: does it fit this target?")
    options = parser.parse_args(arguments)
    try:
        print(describe(options.inspect))
        if options.target:
            print(fits(options.inspect, options.target))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
