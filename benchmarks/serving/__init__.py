"""A load generator for any OpenAI-compatible server: `python -m benchmarks.serving`, which command.py explains."""

from benchmarks.serving.command import main as main
from benchmarks.serving.command import tables as tables
