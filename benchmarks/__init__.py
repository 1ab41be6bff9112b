"""Benchmarks, each `python -m benchmarks.NAME`: one process, alternating order, ratios with their spread."""
