"""The function that everyone reads first stays short. (What it computes is tested by the other files of this folder.)"""

import inspect
import re

from jaxspec.decoding.cycle import cycle


def test_a_cycle_reads_like_the_algorithm():
    """One line per stage, in order, and no arithmetic."""
    source = inspect.getsource(cycle)
    assert len(source.splitlines()) <= 25
    stages = ("gather", "couple", "draft_tree", "verify", "accept", "commit", "advance", "extend", "learn", "report")
    assert re.findall(rf"\b({'|'.join(stages)})\(", source) == list(stages)
    body = source.split('"""')[-1]
    assert not re.search(r"jnp|jax|[-+<>]", body)
