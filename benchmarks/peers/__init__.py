"""Against other engines: the same weights, prompts and machine, everybody in turn in one run."""

from .command import main as main
from .tables import tables as tables
