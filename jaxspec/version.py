"""Which jaxspec this is."""

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "jaxspec-llm"


def own_version() -> str:
    """The installed version; "not installed" where the package only lies on the path."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "not installed"
