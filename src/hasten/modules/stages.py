"""What a model that was cut into pipeline stages still knows of the whole: names here, names elsewhere, copies."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from hasten.modules import forwarding
from hasten.runtime.axes import Axis

TAG = "pipeline"
"""The tag of the forward that runs a stage."""


@dataclass(frozen=True, slots=True)
class StagePart:
    """The part of a whole model that one rank holds. Names are those of the whole model."""

    state_keys: tuple[str, ...]
    """Every key of the whole model's state dict, in its order."""
    parameters: frozenset[str]
    """Every parameter of the whole model, a tied one under its first name."""
    own_keys: frozenset[str]
    """The state this rank writes into checkpoints."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Names of the whole model that are one parameter."""
    whole_names: dict[str, str] = field(default_factory=dict)
    """A parameter's name on this rank to its first name in the whole model, where another rank holds that one."""
    copies: frozenset[str] = frozenset()
    """Parameters here (by their name in the whole model) that another rank holds as well, and counts and writes."""
    axes: frozenset[Axis] = frozenset({Axis.PP})
    """The axes along which ranks hold different parts."""
    first: bool = True
    """No earlier rank along those axes holds the same part."""

    def whole_name(self, name: str) -> str:
        """The first name in the whole model of a parameter that has `name` on this rank."""
        return self.whole_names.get(name, name)


def stage_part(model: nn.Module) -> StagePart | None:
    """What the model is a part of; None when it is whole."""
    if (own := model.__dict__.get("stage_part")) is not None:  # cut by an engine, not by a forward of ours
        found: StagePart = own
        return found
    forward = forwarding.find(model, TAG)
    part: StagePart | None = getattr(forward, "part", None)
    return part
