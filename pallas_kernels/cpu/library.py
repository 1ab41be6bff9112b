"""The library of the C++ kernels for CPUs. It is built when the package is installed, if there is a C++ compiler (setup.py)."""

import ctypes
from functools import cache
from pathlib import Path

import jax

FILE = "kernels"
"""The name of the library's file up to its first dot."""
STORAGES = ("float32", "bfloat16", "float16", "int8", "float8", "q8_0", "q4_0", "q4_1", "q4_k", "q6_k", "fp8_32", "int4_32")
TARGETS = (
    *(f"row_matmul_{storage}" for storage in STORAGES),
    *(f"{kernel}_float32" for kernel in ("tree_attention", "rms_norm", "add_norm", "rotate_qkv")),
)
"""The library's functions, and XLA's names for them."""


@cache
def what_is_missing() -> str | None:
    """Why the kernels can't run here, and what to do; None: they can. Registers them with XLA."""
    files = sorted(Path(__file__).parent.glob(f"{FILE}.*so"))
    if not files:
        return "they were not built: install a C++ compiler (g++ or clang, with C++20) and then jaxspec again"
    try:
        library = ctypes.CDLL(str(files[0]))
        if not library.kernels_run_here():
            return "this CPU has neither AVX2 with FMA nor NEON"
        for name in TARGETS:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    except (OSError, AttributeError) as error:
        return f"the library can't be loaded ({str(error)[:200]}): install jaxspec again"
    except Exception as error:  # XLA's own kinds, such as that for another version of its interface
        return f"XLA does not take the library ({str(error)[:200]}): install jaxspec again"
    return None
