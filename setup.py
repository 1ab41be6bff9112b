"""What pyproject.toml cannot say: the folder benchmarks/ is installed as jaxspec.bench, not as a top-level package, and the C++
kernels for CPUs are built where there is a compiler."""

from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

PACKAGES = find_packages(include=["jaxspec*", "pallas_kernels*", "convert*"])
BENCHMARKS = [name.replace("benchmarks", "jaxspec.bench", 1) for name in find_packages(include=["benchmarks*"])]
CPU_KERNELS = Extension(
    "pallas_kernels.cpu.kernels",
    sorted(str(file) for file in Path("pallas_kernels").rglob("*.cc")),
    depends=[str(file) for pattern in ("*.inc", "*.h") for file in Path("pallas_kernels").rglob(pattern)],
    language="c++",
    extra_compile_args=["-std=c++20", "-O3", "-ffp-contract=fast", "-fvisibility=hidden", "-Wno-psabi"],
    py_limited_api=True,  # it has nothing of Python's: one file for all versions
    optional=True,  # without it products and attention are XLA's
)


class Build(build_ext):
    """Builds no Python module, so there is no init function to export."""

    def get_export_symbols(self, ext):
        return []


setup(
    packages=PACKAGES + BENCHMARKS,
    package_dir={"jaxspec.bench": "benchmarks"},
    ext_modules=[CPU_KERNELS],
    cmdclass={"build_ext": Build},
)
