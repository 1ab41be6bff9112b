"""A load generator for any OpenAI-compatible server: `python -m benchmarks.serving`, which command.py explains."""

from .command import main as main
from .command import tables as tables
