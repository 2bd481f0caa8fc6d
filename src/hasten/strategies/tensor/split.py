"""The decision which layers of a model are split over the tensor-parallel ranks: a record, filled step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hasten.config.parallel import TensorStyle

Role = Literal["query", "key"]


@dataclass(slots=True)
class Split:
    """The layers of one model that are split, by name, and the layers an automatic plan looked at and left whole."""

    source: str
    styles: dict[str, TensorStyle] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    """Why, by name."""
    summed: list[str] = field(default_factory=list)
    """Whole modules that each rank applies to its own heads alone: their gradients are summed over the ranks."""
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Counts that a module keeps of what is split, such as heads, by the module's name: their value on one rank."""
    numbers: dict[str, int] = field(default_factory=dict)
    """Heads of layers whose heads several ranks share, and experts of modules that hold some, by name."""
    roles: dict[str, Role] = field(default_factory=dict)
    """Projections of queries, and of keys or values, by name."""
    dropouts: dict[str, bool] = field(default_factory=dict)
    """Dropouts of adapters inside split regions, by name, and whether each rank sees a part of their input."""
    automatic: bool = False
    """Whether the plan was found in the model's structure, so that counts of heads are divided without being named."""

    def drop(self, name: str, why: str) -> None:
        """Leave a layer whole and note the reason."""
        self.styles.pop(name, None)
        self.roles.pop(name, None)
        self.left[name] = why
