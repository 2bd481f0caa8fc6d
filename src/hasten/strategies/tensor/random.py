"""Random numbers inside a split region: different on every rank there, equal on all ranks outside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hasten.modules import forwarding
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
        self._device = self._device if weight is None else weight.device  # a dropout has none: as before
        self._outside = torch.get_rng_state(), self._on_device()
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

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager that draws from the common stream inside a region; the region's own stream continues after it."""
        if self._outside is None:
            yield
            return
        inside = torch.get_rng_state(), self._on_device()
        self.end()
        try:
            yield
        finally:
            self._outside = torch.get_rng_state(), self._on_device()
            torch.set_rng_state(inside[0])
            if inside[1] is not None:
                torch.cuda.set_rng_state(inside[1], self._device)

    def _on_device(self) -> Tensor | None:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None


class DrawnApart(forwarding.Forward):
    """The forward of a dropout beside a split layer, as an adapter has one: it draws as its input is held.

    An input that every rank has whole loses the same elements on all ranks; one of which each rank has a part does not.
    """

    tag = "drawn apart"

    def __init__(self, apart: ApartStream, by_part: bool) -> None:
        self.apart = apart
        self.by_part = by_part

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # Any: a dropout's argument and result
        if not self.by_part:
            with self.apart.paused():
                return self.inner(*args, **kwargs)
        self.apart.begin(self.module)
        try:
            return self.inner(*args, **kwargs)
        finally:
            self.apart.end()
