"""`python -m jaxspec.plan` is `jaxspec plan`."""

import sys

from jaxspec.planner.command import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m jaxspec.plan"))
