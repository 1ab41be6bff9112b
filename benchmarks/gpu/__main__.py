"""`python -m benchmarks.gpu`."""

from benchmarks.engines import exit_on_error
from benchmarks.gpu.command import main

if __name__ == "__main__":
    exit_on_error(main)
