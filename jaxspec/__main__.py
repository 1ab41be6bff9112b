"""python -m jaxspec is the command `jaxspec`."""

import sys

from jaxspec.cli import main

if __name__ == "__main__":
    sys.exit(main())
