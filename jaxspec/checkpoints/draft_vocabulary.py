"""EAGLE-3's token map inside a checkpoint: `d2t`, offsets from draft to target ids, and `t2d`, which target ids have a draft id."""

from typing import NamedTuple

import numpy as np

from jaxspec.checkpoints.checkpoint import Needed
from jaxspec.checkpoints.layout import ReadTensor


class DraftVocabulary(NamedTuple):
    """The parameter `draft_to_target`, int32 [draft_vocab_size]: target id = draft id + d2t[draft id].

    In:  d2t [0, 2, 2]
    Out: [0, 3, 4]
    """

    draft_vocab_size: int
    vocab_size: int
    has_offsets: bool = True
    """The checkpoint has `d2t`. False: draft ids are target ids."""
    has_members: bool = True
    """The checkpoint has `t2d`, which says nothing that `d2t` does not; it must agree."""

    def needed(self) -> dict[str, Needed]:
        needed = {}
        if self.has_offsets:
            needed["d2t"] = Needed((self.draft_vocab_size,), floating=False)
        if self.has_members:
            needed["t2d"] = Needed((self.vocab_size,), floating=False)
        return needed

    def join(self, read: ReadTensor) -> np.ndarray:
        ids = np.arange(self.draft_vocab_size)
        if self.has_offsets:
            ids = ids + read("d2t")
        if ids.min() < 0 or ids.max() >= self.vocab_size or len(np.unique(ids)) != len(ids):
            raise ValueError(
                f"d2t must map to distinct target ids in [0, {self.vocab_size}); it reaches {ids.min()} to {ids.max()}, "
                f"{len(np.unique(ids))} of {len(ids)} distinct"
            )
        if self.has_members and not np.array_equal(np.flatnonzero(read("t2d")), np.sort(ids)):
            raise ValueError("tensors d2t and t2d disagree about which tokens are in the draft vocabulary: one of them is wrong")
        return ids.astype(np.int32)

    def split(self, parameter: np.ndarray) -> dict[str, np.ndarray]:
        """d2t and t2d; none if draft ids are target ids and the checkpoint is not to say so."""
        offsets = parameter.astype(np.int64) - np.arange(self.draft_vocab_size)
        members = np.zeros(self.vocab_size, np.bool_)
        members[parameter] = True
        return {"d2t": offsets, "t2d": members} if self.has_offsets or offsets.any() else {}
