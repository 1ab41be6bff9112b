"""The version of jaxspec."""

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "jaxspec-llm"


def own_version() -> str:
    """The installed version; "not installed" if the package is only on the path."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "not installed"
