"""The function that everyone reads first stays short. (What it computes is tested by the other files of this folder.)"""

import inspect
import re

from jaxspec.decoding.cycle import cycle, propose, settle


def test_a_cycle_reads_like_the_algorithm():
    """One line per stage, in order, and no arithmetic."""
    stages = {
        cycle: ("gather", "propose", "settle"),
        propose: (r"drafter\.propose", "rank"),
        settle: ("verify", "accept", "commit", "advance", "extend", "learn", "report"),
    }
    for part, expected in stages.items():
        source = inspect.getsource(part)
        assert len(source.splitlines()) <= 25
        body = source.split('"""')[-1]
        found = re.findall(rf"\b({'|'.join(each for names in stages.values() for each in names)})\(", body)
        assert found == [name.replace("\\", "") for name in expected]
        assert not re.search(r"jnp|jax|[-+<>]", body)
