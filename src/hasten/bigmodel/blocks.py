"""Units: modules whose offloaded weights come and go together, and what that takes beyond plain memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hasten.bigmodel.packs import Entry, Pack


@dataclass(slots=True, eq=False)
class Unit:
    """A module whose forward needs packs, and the recurrent modules in it that keep lists of their weights."""

    module: nn.Module
    name: str
    packs: list[Pack]
    recurrent: list[nn.RNNBase] = field(default_factory=list)
    resident: bool = False
    """Holds other units, so that its tensors are in use while they stream."""
    num_parameters: int = -1
    """As many as there were when those outside the packs were last looked at."""

    def move_others(self, device: torch.device) -> None:
        """Bring parameters that are in no pack, such as adapters added since, to the device for good."""
        found = list(self.module.parameters())
        if len(found) == self.num_parameters or self.resident:
            return
        self.num_parameters = len(found)
        known = {id(entry.rest) for pack in self.packs for entry in (*pack.entries, *pack.loose)}
        for parameter in found:
            if id(parameter) not in known and parameter.device != device and not parameter.is_meta:
                parameter.data = parameter.data.to(device)


def put_loose(entry: Entry, device: torch.device) -> None:
    """Let the model use a copy of a tensor that is no plain memory, moved by its own rules."""
    moved: Any = entry.rest.detach().to(device)
    entry.put(nn.Parameter(moved, requires_grad=False) if isinstance(entry.rest, nn.Parameter) else moved)


def relist(recurrent: Sequence[nn.RNNBase]) -> None:
    """Let recurrent modules see the weights that are in place now; they keep a list of them."""
    for module in recurrent:
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def window(units: Sequence[Unit], streamed: Sequence[Pack], count: int) -> int:
    """Bytes that hold any `count` units in a row."""
    wanted = set(streamed)
    rows = [[pack for pack in unit.packs if pack in wanted] for unit in units]
    rows = [row for row in rows if row]
    most = 0
    for start in range(len(rows)):
        near = {pack for step in range(min(count, len(rows))) for pack in rows[(start + step) % len(rows)]}
        most = max(most, sum(pack.num_bytes for pack in near))
    return most
