"""`python -m benchmarks.gpu`."""

from ..options import exit_on_error
from .command import main

if __name__ == "__main__":
    exit_on_error("gpu", main)
