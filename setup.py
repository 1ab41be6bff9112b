"""What pyproject.toml cannot say: the folder benchmarks/ is installed as jaxspec.bench, not as a top-level package."""

from setuptools import find_packages, setup

PACKAGES = find_packages(include=["jaxspec*", "pallas_kernels*", "convert*"])
BENCHMARKS = [name.replace("benchmarks", "jaxspec.bench", 1) for name in find_packages(include=["benchmarks*"])]

setup(packages=PACKAGES + BENCHMARKS, package_dir={"jaxspec.bench": "benchmarks"})
