"""Benchmarks, each `jaxspec bench NAME`: one process, alternating order, ratios with their spread."""
