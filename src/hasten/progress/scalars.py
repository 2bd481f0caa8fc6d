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
    tensor_groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for tensor_index, tensor in enumerate(tensors):
        tensor_groups.setdefault((tensor.device, tensor.dtype), []).append(tensor_index)
    numbers: list[float] = [0.0] * len(tensors)
    for indices in tensor_groups.values():
        # stacking would compile a program for each number of tensors
        if kind_of(tensors[indices[0]].device).lazy:
            for tensor_index in indices:
                numbers[tensor_index] = float(tensors[tensor_index])
            continue
        flat_tensors = [tensors[index].reshape(()) for index in indices]
        with torch.no_grad():
            stacked_scalars = torch.stack(flat_tensors)
        for tensor_index, number in zip(indices, stacked_scalars.tolist(), strict=True):
            numbers[tensor_index] = number
    return numbers


class LateScalars:
    """The newest values that have arrived on the host; reading does not wait unless requested."""

    def __init__(self) -> None:
        self._given: dict[str, float | str | Tensor] = {}
        self._shown: dict[str, float | str] = {}
        self._sent: tuple[list[str], HostCopy] | None = None

    def store_values(self, values: Mapping[str, float | str | Tensor]) -> None:
        """Store the newest values; tensors are neither copied nor moved."""
        self._given.update(values)

    def read(self, wait: bool = False) -> dict[str, float | str]:
        """Return the newest values known on the host: those on a device are one read behind, or current with `wait`."""
        self._collect_copy(wait)
        for value_name, scalar_value in self._given.items():
            if not isinstance(scalar_value, Tensor):
                self._shown[value_name] = scalar_value
            elif wait or not _is_on_device(scalar_value):
                self._shown[value_name] = float(scalar_value.detach())
        if not wait and self._sent is None:
            self._start_copy()
        shown_scalars = {}
        for value_name in self._given:
            if value_name in self._shown:
                shown_scalars[value_name] = self._shown[value_name]
        return shown_scalars

    def _start_copy(self) -> None:
        """Start a copy to the host."""
        device_scalars = {}
        for value_name, scalar_value in self._given.items():
            if isinstance(scalar_value, Tensor) and _is_on_device(scalar_value):
                device_scalars[value_name] = scalar_value
        if not device_scalars:
            return
        device = next(iter(device_scalars.values())).device
        value_names = []
        scalars = []
        for value_name, scalar_value in device_scalars.items():
            if scalar_value.device == device:
                value_names.append(value_name)
                scalars.append(scalar_value.detach().float().reshape(()))
        stacked_scalars = torch.stack(scalars)
        self._sent = (value_names, HostCopy(stacked_scalars))

    def _collect_copy(self, wait: bool) -> None:
        """Read the numbers of the last copy if it is complete."""
        if self._sent is None:
            return
        value_names, values = self._sent
        if wait or values.is_ready():
            self._shown.update(zip(value_names, values.wait().tolist(), strict=True))
            self._sent = None


def _is_on_device(scalar_value: Tensor) -> bool:
    """Return whether the value can be copied to the host asynchronously."""
    return scalar_value.device.type != "cpu" and not kind_of(scalar_value.device).lazy
