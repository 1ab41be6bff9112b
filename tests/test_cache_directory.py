"""Where jaxspec keeps what it can make again."""

from pathlib import Path

import pytest

from jaxspec.cache_directory import cache_directory


@pytest.mark.parametrize(
    ("given", "found"), [(None, "/home/me/.cache"), ("", "/home/me/.cache"), ("a/b", "/home/me/.cache"), ("/tmp/x", "/tmp/x")]
)
def test_it_is_where_the_environment_says(monkeypatch, given, found):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if given is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert cache_directory() == Path(found) / "jaxspec"
