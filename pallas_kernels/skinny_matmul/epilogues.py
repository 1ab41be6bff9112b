"""What a block of columns does with its sums before it writes them."""

from typing import NamedTuple


class SwiGlu(NamedTuple):
    """silu(gate) * up. The weight holds the gate's columns, then the up projection's; a block reads the same columns of both."""


Epilogue = SwiGlu | None
