"""The limits on file length. Format, lint and types are checked by .ci/run."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxspec", "pallas_kernels", "convert", "benchmarks")


@pytest.mark.parametrize("package", PACKAGES)
def test_files_are_short_enough_to_read(package):
    limit = 500 if package == "pallas_kernels" else 400
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / package).rglob("*.py")}
    assert lengths and not {str(path.relative_to(ROOT)): length for path, length in lengths.items() if length > limit}


def test_kernels_do_not_import_the_engine():
    assert not [
        path
        for path in (ROOT / "pallas_kernels").rglob("*.py")
        if "import jaxspec" in (text := path.read_text()) or "from jaxspec" in text
    ]
