"""`python -m benchmarks.speculative`."""

from benchmarks.engines import exit_on_error
from benchmarks.speculative.command import main

if __name__ == "__main__":
    exit_on_error(main)
