"""A plan: what a checkpoint is and how its tensors become a model's parameters, made from names, shapes and config alone."""

from dataclasses import dataclass

from jaxspec.checkpoints.checkpoint import Checkpoint, Needed
from jaxspec.checkpoints.layout import Layout
from jaxspec.config import ModelConfig
from jaxspec.models.head import HeadConfig


@dataclass(frozen=True)
class Plan[Config: ModelConfig | HeadConfig]:
    """Nothing of it reads a value, so a checkpoint of any size is checked at once."""

    dialect: str
    """Where the names and config fields come from, for people."""
    config: Config
    layout: Layout
    ignored: frozenset[str] = frozenset()
    """Tensors that the checkpoint may hold and the model does not need."""

    def needed(self) -> dict[str, Needed]:
        """All tensors that the model is made of."""
        return {name: needed for source in self.layout.values() for name, needed in source.needed().items()}

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises ValueError naming every tensor that is missing, misshapen or unknown."""
        checkpoint.check(self.needed(), self.ignored)
