"""`python -m benchmarks.serving`."""

from benchmarks.engines import exit_on_error
from benchmarks.serving.command import main

if __name__ == "__main__":
    exit_on_error(main)
