"""The server as on a machine that has 3 GB of memory for it: `python -m tests.checkpoints.small_machine OPTIONS`."""

import sys
from unittest.mock import patch

from jaxspec.host_memory import own_memory
from jaxspec.serve import main

MEMORY = 3_000_000_000

if __name__ == "__main__":
    with patch("jaxspec.engine.memory.available_memory", lambda: MEMORY - own_memory()):
        sys.exit(main(sys.argv[1:]))
