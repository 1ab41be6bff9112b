"""Against other engines: the same weights, prompts and machine, everybody in turn in one run."""

from benchmarks.peers.command import main as main
from benchmarks.peers.tables import tables as tables
