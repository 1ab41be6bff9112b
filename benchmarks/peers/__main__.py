"""`python -m benchmarks.peers`."""

from ..options import exit_on_error
from .command import main

exit_on_error("peers", main)
