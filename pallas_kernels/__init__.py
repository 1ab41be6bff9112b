"""GPU kernels, each behind an `api.py` with an XLA reference. Nothing here imports jaxspec."""
