"""Benchmarks: `python -m benchmarks.NAME` in a clone, `jaxspec bench NAME` where the package is installed (as jaxspec.bench)."""
