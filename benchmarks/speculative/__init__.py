"""Which draft tree is fastest here, and by how much: `python -m benchmarks.speculative`, which command.py explains."""

from benchmarks.speculative.command import main as main
from benchmarks.speculative.tables import tables as tables
