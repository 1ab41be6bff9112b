"""From results to a page with plots, and to the tables of the README and docs/: `python -m benchmarks.report`."""

from benchmarks.report.command import main as main
