"""Reading of scalar tensors in bulk, or without waiting for their device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hasten.runtime.devices import kind_of
from hasten.runtime.streams import HostCopy


def fetch_scalars(tensors: Sequence[Tensor]) -> list[float]:
    """Return the numbers in one-element `tensors`, with one transfer per device and dtype."""
    if not tensors:
        return []
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    numbers: list[float] = [0.0] * len(tensors)
    for indices in groups.values():
        # stacking would compile a program for each number of tensors
        if kind_of(tensors[indices[0]].device).lazy:
            for index in indices:
                numbers[index] = float(tensors[index])
            continue
        flat = [
            tensor if tensor.ndim == 0 else tensor.reshape(())
            for tensor in (tensors[i] for i in indices)
        ]
        with torch.no_grad():
            stacked = torch.stack(flat)
        for index, number in zip(indices, stacked.tolist(), strict=True):
            numbers[index] = number
    return numbers


class LateScalars:
    """The newest values that have arrived on the host; reading does not wait unless requested."""

    def __init__(self) -> None:
        self._given: dict[str, float | str | Tensor] = {}
        self._shown: dict[str, float | str] = {}
        self._sent: tuple[list[str], HostCopy] | None = None

    def give(self, values: Mapping[str, float | str | Tensor]) -> None:
        """Store the newest values; tensors are neither copied nor moved."""
        self._given.update(values)

    def read(self, wait: bool = False) -> dict[str, float | str]:
        """Return the newest values known on the host: those on a device are one read behind, or current with `wait`."""
        self._collect(wait)
        for name, value in self._given.items():
            if not isinstance(value, Tensor):
                self._shown[name] = value
            elif wait or not _travels(value):
                self._shown[name] = float(value.detach())
        if not wait and self._sent is None:
            self._send()
        return {name: self._shown[name] for name in self._given if name in self._shown}

    def _send(self) -> None:
        """Start a copy to the host."""
        waiting = {
            n: v
            for n, v in self._given.items()
            if isinstance(v, Tensor) and _travels(v)
        }
        if not waiting:
            return
        device = next(iter(waiting.values())).device
        names = [name for name, value in waiting.items() if value.device == device]
        stacked = torch.stack(
            [waiting[name].detach().float().reshape(()) for name in names]
        )
        self._sent = (names, HostCopy(stacked))

    def _collect(self, wait: bool) -> None:
        """Read the numbers of the last copy if it is complete."""
        if self._sent is None:
            return
        names, values = self._sent
        if wait or values.is_ready():
            self._shown.update(zip(names, values.wait().tolist(), strict=True))
            self._sent = None


def _travels(value: Tensor) -> bool:
    """Return whether the value can be copied to the host asynchronously."""
    return value.device.type != "cpu" and not kind_of(value.device).lazy
