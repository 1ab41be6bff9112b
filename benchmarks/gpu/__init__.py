"""Everything that only a GPU can tell, in one command: `python -m benchmarks.gpu`, which command.py explains."""

from .command import main as main
