"""`python -m benchmarks.peers`."""

from benchmarks.engines import exit_on_error
from benchmarks.peers.command import main

exit_on_error(main)
