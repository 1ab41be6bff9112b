"""What every draft head does: reads a token and the feature of the position before it, and proposes the next token."""

from typing import NamedTuple

from flax import nnx

from jaxspec.models.layers import Rows
from jaxspec.models.llama import Llama
from jaxspec.typing import Array, Float, Int, KeysValues


class HeadOutput(NamedTuple):
    """What one forward of a draft head returns; nothing is written to the cache."""

    hidden: Float[Array, "b w h"]
    """The head's output: fed back as the next row's hidden, and read by `logits`."""
    window: tuple[KeysValues, ...]
    """Each head layer's keys and values of all window rows so far, the earlier ones first."""


class DraftHead(nnx.Module):
    """A row is a pair: the embedding of token i with what is known of position i - 1.

    That is the target's feature there (through `project`), or, while drafting, the head's own output at the row's parent.
    """

    def project(self, features: Float[Array, "b w f"]) -> Float[Array, "b w h"]:
        """The target's features in the width that `__call__` takes as `hidden`; a fed-back hidden needs no projection."""
        raise NotImplementedError

    def __call__(
        self,
        embeddings: Float[Array, "b w h"],
        hidden: Float[Array, "b w h"],
        rows: Rows,
        cache: tuple[KeysValues, ...] | None = None,
        window: tuple[KeysValues, ...] | None = None,
    ) -> HeadOutput:
        """Runs the rows; the keys and values of earlier window rows come in `window`."""
        raise NotImplementedError

    def logits(self, hidden: Float[Array, "*rows h"], target: Llama) -> Float[Array, "*rows v"]:
        """Logits over the draft vocabulary, in float32."""
        raise NotImplementedError

    def target_ids(self, draft_ids: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        """Target vocabulary ids of draft vocabulary ids."""
        raise NotImplementedError
