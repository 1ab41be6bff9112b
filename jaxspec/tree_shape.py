"""The shape of a draft tree (TreeShape)."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxspec.checks import is_int


@dataclass(frozen=True, init=False)
class TreeShape:
    """The draft tree: depth, width and number of verified nodes. SGLang's three numbers, with its names.

    TreeShape() is 5/4/8; TreeShape(num_steps=0) is plain decoding; topk=1 is a chain of num_steps + 1 nodes.
    Give all three numbers or none (topk=1 and num_steps=0 need no num_draft_tokens). Where n-grams are merged with a head, a fourth
    limits the head: 7/4/8/3 is TreeShape(7, 4, 8, head_steps=3).
    """

    num_steps: int
    """Levels below the root; at most num_steps drafts are accepted per cycle."""
    topk: int
    """Children kept per drafted token."""
    num_draft_tokens: int
    """Nodes that the target verifies, the root included."""
    head_steps: int | None = None
    """Levels that a head drafts, where deeper ones are left to n-grams, whose depth costs nothing; 0: it only absorbs the accepted
    tokens. None: all."""

    def __init__(
        self,
        num_steps: int | None = None,
        topk: int | None = None,
        num_draft_tokens: int | None = None,
        head_steps: int | None = None,
    ):
        given = {"num_steps": num_steps, "topk": topk, "num_draft_tokens": num_draft_tokens}
        for name, value in (given | {"head_steps": head_steps}).items():
            if value is not None and not (is_int(value) and value >= 0):
                raise ValueError(f"{name} must be a whole number >= 0, got {value!r:.80}")
        num_steps, topk, num_draft_tokens = (None if value is None else int(value) for value in given.values())
        if num_steps is None and topk is None and num_draft_tokens is None:
            num_steps, topk, num_draft_tokens = 5, 4, 8
        elif num_steps == 0:
            if topk not in (None, 0, 1) or num_draft_tokens not in (None, 0, 1):
                raise ValueError(f"num_steps=0 is plain decoding and takes no tree: leave out {topk=} and {num_draft_tokens=}")
            topk, num_draft_tokens = 1, 1
        elif num_steps is not None and topk == 1:
            if num_draft_tokens not in (None, num_steps + 1):
                message = f"topk=1 drafts a chain: {num_draft_tokens=} becomes num_steps + 1 = {num_steps + 1}"
                warnings.warn(message, stacklevel=2)
            num_draft_tokens = num_steps + 1
        if num_steps is None or topk is None or num_draft_tokens is None:
            missing = ", ".join(name for name, value in given.items() if value is None)
            raise ValueError(f"give num_steps, topk and num_draft_tokens together or none of them; missing: {missing}")
        if topk < 1:
            raise ValueError("topk must be at least 1; for plain decoding give num_steps=0")
        available = most_nodes(num_steps, topk)
        if not min(2, available) <= num_draft_tokens <= available:
            raise ValueError(
                f"{num_draft_tokens=} must be between 2 and {available} = 1 + topk + (num_steps - 1) * topk^2, the root and "
                f"all that {num_steps=} and {topk=} draft: lower num_draft_tokens or raise num_steps or topk"
            )
        object.__setattr__(self, "num_steps", num_steps)
        object.__setattr__(self, "topk", topk)
        object.__setattr__(self, "num_draft_tokens", num_draft_tokens)
        if head_steps is not None and head_steps > num_steps:
            raise ValueError(f"{head_steps=} must be at most {num_steps=}, the levels of the tree: lower it or leave it out")
        if head_steps not in (None, num_steps):  # equal trees have one name
            object.__setattr__(self, "head_steps", int(head_steps))

    def __repr__(self) -> str:  # stored programs have it in their names
        return f"TreeShape({', '.join(f'{name}={value}' for name, value in vars(self).items())})"

    def __str__(self) -> str:
        return "/".join(map(str, vars(self).values()))

    @property
    def name(self) -> str:
        """As people write it: "5/4/8", or "plain" for plain decoding."""
        return str(self) if self.num_steps else "plain"

    @property
    def of_head(self) -> "TreeShape":
        """What a head drafts of it: all, or its first levels.

        In:  7/4/8/1
        Out: 1/4/5
        """
        if not self.head_steps:
            return self if self.head_steps is None else PLAIN
        return TreeShape(self.head_steps, self.topk, min(self.num_draft_tokens, most_nodes(self.head_steps, self.topk)))

    def limited(self, head_steps: int) -> "TreeShape":
        """This tree, of which a head drafts so many levels only."""
        return TreeShape(self.num_steps, self.topk, self.num_draft_tokens, head_steps)

    @classmethod
    def of(cls, value: "TreeLike") -> "TreeShape":
        """A draft tree in any of the ways in which it is written.

        In:  TreeShape(5, 4, 8) or "5/4/8" or (5, 4, 8) or {"num_steps": 5, "topk": 4, "num_draft_tokens": 8}
        Out: TreeShape(5, 4, 8)
        In:  "7/4/8/3" or (7, 4, 8, 3)
        Out: TreeShape(7, 4, 8, head_steps=3)
        In:  "plain" or "0" or {"num_steps": 0}
        Out: TreeShape(num_steps=0)

        Raises:
            ValueError: `value` is none of these, or its numbers don't make a tree.
        """
        if isinstance(value, TreeShape):
            return value
        if isinstance(value, str) and value.strip() in ("0", "plain"):
            return PLAIN
        if isinstance(value, str) and re.fullmatch(r"\d{1,4}(/\d{1,4}){2,3}", value.strip()):
            return cls(*map(int, value.split("/")))
        if isinstance(value, Mapping) and value:
            names = {str(name): str(name).removeprefix("speculative_").replace("eagle_topk", "topk") for name in value}
            unknown = [name for name, own in names.items() if own not in ("num_steps", "topk", "num_draft_tokens", "head_steps")]
            if unknown or len(set(names.values())) < len(names):
                has = "num_steps, topk and num_draft_tokens, and may have head_steps"
                raise ValueError(f"a draft tree has {has}, got {', '.join(unknown or names):.80}")
            return cls(**{own: value[name] for name, own in names.items()})
        if isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) in (3, 4):
            return cls(*value)
        notation = 'num_steps/topk/num_draft_tokens, as in "5/4/8", or head_steps too, as in "7/4/8/3", or "plain"'
        raise ValueError(f"a draft tree is {notation}; got {value!r:.80}")


def most_nodes(num_steps: int, topk: int) -> int:
    """Of a tree: the root and all that are drafted."""
    return 1 + topk + (num_steps - 1) * topk**2 if num_steps else 1


type TreeLike = TreeShape | str | Sequence[int] | Mapping[str, int]
"""The argument of TreeShape.of."""


def names_of(trees: Sequence[TreeShape]) -> str:
    """In:  TreeShape(num_steps=0), TreeShape(3, 1)
    Out: plain, 3/1/4
    """
    return ", ".join(tree.name for tree in trees)


PLAIN = TreeShape(num_steps=0)
"""No draft tree: plain decoding."""
NGRAM_TREE = TreeShape(7, 4, 8)
"""The default of n-gram drafts, whose depth costs nothing."""
