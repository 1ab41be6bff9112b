"""check-lossless with a record."""

import pytest

from benchmarks import lossless


@pytest.mark.exhaustive
def test_lossless_compares_token_for_token(tiny, tmp_path, newest, capsys):
    flags = ["--max-tokens", "6", "--trees", "2/2/4", "--batch", "2", "--out", str(tmp_path / "out.jsonl")]
    assert lossless.main([*tiny, *flags]) == 0
    results = newest()["results"]
    assert len(results) == 4  # plain decoding and the tree, greedy and sampled
    assert "2/2" in capsys.readouterr().out
    assert "4 of 4 |" in lossless.tables(results)["trees"]
