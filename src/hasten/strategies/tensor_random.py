"""Random numbers inside a split region: different on every rank there, equal on all ranks outside it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hasten.modules.dropout import may_draw


class ApartStream:
    """Switches to a stream of this rank's own where a split region begins, and back where it ends.

    Ranks of one tensor-parallel group drop the same elements of activations they all hold, and must drop different
    elements of activations each holds a part of. The rank's stream is derived from the common one, so recomputed
    activations and resumed runs draw the same numbers again.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._needed = may_draw(model)
        self._rank = rank
        self._outside: tuple[Tensor, Tensor | None] | None = None
        self._device = torch.device("cpu")

    def begin(self, module: nn.Module) -> None:
        """Draw numbers of this rank's own from here on; nothing changes inside a region already begun."""
        if not self._needed or not module.training or self._outside is not None or torch.compiler.is_compiling():
            return
        seed = int(torch.randint(2**62, ()))
        weight = next(module.parameters(), None)
        self._device = torch.device("cpu") if weight is None else weight.device
        on_device = None
        if self._device.type == "cuda":
            on_device = torch.cuda.get_rng_state(self._device)
        self._outside = torch.get_rng_state(), on_device
        torch.manual_seed(seed + self._rank)

    def end(self) -> None:
        """Draw from the common stream again."""
        if self._outside is None:
            return
        host, on_device = self._outside
        self._outside = None
        torch.set_rng_state(host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, self._device)
