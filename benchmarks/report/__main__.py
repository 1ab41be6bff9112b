"""`python -m benchmarks.report`."""

from benchmarks.engines import exit_on_error
from benchmarks.report.command import main

if __name__ == "__main__":
    exit_on_error(main)
