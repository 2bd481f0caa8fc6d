"""The loop's position: everything that changes inside an accumulation window, as of its beginning, which is what checkpoints hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from hasten.data.random_states import States
from hasten.errors import StepError
from hasten.modules.names import is_dtensor, plain_name


@dataclass(frozen=True, slots=True)
class Generators:
    """States of the generators of Python, numpy, torch and the device."""

    seed: int
    process: States
    device: Tensor | None


@dataclass(frozen=True, slots=True)
class LoopPosition:
    """State that changes between two micro-steps. Weights, optimizers and schedules do not."""

    loaders: Sequence[Mapping[str, Any]]
    generators: Generators | None
    """None if they have not been read."""
    clock: Mapping[str, Any]
    epochs: Mapping[str, Any] | None
    tracked_step: int | None
    registered: Mapping[int, Any]
    """States of the registered objects that follow the data, by index."""
    buffers: Mapping[str, Tensor]
    """Values of the buffers that may have changed since, by numbered name."""


_SMALL_BYTES: Final = 1 << 20


class BufferCopies:
    """Copies of the buffers that a forward changes, such as the statistics of batch normalisation."""

    def __init__(self) -> None:
        self._slots: list[tuple[str, dict[str, Tensor | None], str]] = []
        self._models: list[nn.Module] = []
        self._versions: dict[str, tuple[Tensor, int]] = {}
        self._copies: dict[str, Tensor] = {}

    def copy_changing(self, models: list[nn.Module]) -> dict[str, Tensor]:
        """Return copies of small buffers, and of the large ones that changed since an earlier call. They last until the next call.

        Small ones are copied always, because batch normalisation changes its statistics without counting a version.
        """
        if models != self._models:
            self._find_slots(models)
        versions: dict[str, tuple[Tensor, int]] = {}
        targets, sources = [], []
        for name, buffers, key in self._slots:
            buffer = buffers.get(key)
            if buffer is None or is_dtensor(buffer) or buffer.device.type == "meta":
                continue
            versions[name] = buffer, _version(buffer)
            copied = self._copies.get(name)
            if copied is None and not self._is_to_copy(name, buffer):
                continue
            if copied is None or (copied.shape, copied.dtype, copied.device) != (
                buffer.shape,
                buffer.dtype,
                buffer.device,
            ):
                copied = self._copies[name] = torch.empty_like(buffer)
            targets.append(copied)
            sources.append(buffer.detach())
        self._versions = versions
        if targets:
            torch._foreach_copy_(targets, sources)
        return self._copies

    def _is_to_copy(self, name: str, buffer: Tensor) -> bool:
        if buffer.nbytes <= _SMALL_BYTES:
            return True
        known = self._versions.get(name)
        return known is not None and (
            known[0] is not buffer or known[1] != _version(buffer)
        )

    def refuse_late_changes(self, copies: Mapping[str, Tensor]) -> None:
        """Raise StepError if a buffer without a copy has changed since the last call of `copy_changing`."""
        for name, buffers, key in self._slots:
            if name not in copies and name in self._versions:
                buffer, version = self._versions[name]
                if buffers.get(key) is not buffer or _version(buffer) != version:
                    raise StepError(
                        f"save_state() was called inside an accumulation window in which the buffer {name} changed for the first time, so its value "
                        "at the window's beginning is not known. Nothing was saved. Save where accelerator.sync_gradients is True, after "
                        "optimizer.step()."
                    )

    def _find_slots(self, models: list[nn.Module]) -> None:
        self._slots, self._models, self._versions, self._copies = (
            [],
            list(models),
            {},
            {},
        )
        for index, model in enumerate(models):
            number = f"model_{index}" if index else "model"
            for path, module in model.named_modules():
                for key in module._buffers:
                    name = plain_name(f"{path}.{key}" if path else key)
                    self._slots.append((f"{number}/{name}", module._buffers, key))


def _version(tensor: Tensor) -> int:
    """Return the number of changes in place; 0 for a tensor made in inference mode, which does not count them."""
    return 0 if tensor.is_inference() else tensor._version
