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


_MAX_SMALL_BYTES: Final = 1 << 20


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
        buffer_versions: dict[str, tuple[Tensor, int]] = {}
        target_tensors = []
        source_tensors = []
        for buffer_name, module_buffers, buffer_key in self._slots:
            buffer = module_buffers.get(buffer_key)
            if buffer is None or is_dtensor(buffer) or buffer.device.type == "meta":
                continue
            buffer_versions[buffer_name] = buffer, _tensor_version(buffer)
            buffer_copy = self._copies.get(buffer_name)
            if buffer_copy is None and not self._is_to_copy(buffer_name, buffer):
                continue
            if buffer_copy is None or (
                buffer_copy.shape,
                buffer_copy.dtype,
                buffer_copy.device,
            ) != (
                buffer.shape,
                buffer.dtype,
                buffer.device,
            ):
                buffer_copy = self._copies[buffer_name] = torch.empty_like(buffer)
            target_tensors.append(buffer_copy)
            source_tensors.append(buffer.detach())
        self._versions = buffer_versions
        if target_tensors:
            torch._foreach_copy_(target_tensors, source_tensors)
        return self._copies

    def _is_to_copy(self, buffer_name: str, buffer: Tensor) -> bool:
        if buffer.nbytes <= _MAX_SMALL_BYTES:
            return True
        known_version = self._versions.get(buffer_name)
        return known_version is not None and (
            known_version[0] is not buffer
            or known_version[1] != _tensor_version(buffer)
        )

    def refuse_late_changes(self, buffer_copies: Mapping[str, Tensor]) -> None:
        """Raise StepError if a buffer without a copy has changed since the last call of `copy_changing`."""
        for buffer_name, module_buffers, buffer_key in self._slots:
            if buffer_name not in buffer_copies and buffer_name in self._versions:
                buffer, version = self._versions[buffer_name]
                if (
                    module_buffers.get(buffer_key) is not buffer
                    or _tensor_version(buffer) != version
                ):
                    raise StepError(
                        f"save_state() was called inside an accumulation window in which the buffer {buffer_name} changed for the first time, so its value "
                        "at the window's beginning is not known. Nothing was saved. Save where accelerator.sync_gradients is True, after "
                        "optimizer.step()."
                    )

    def _find_slots(self, models: list[nn.Module]) -> None:
        self._slots = []
        self._models = list(models)
        self._versions = {}
        self._copies = {}
        for index, model in enumerate(models):
            model_number = f"model_{index}" if index else "model"
            for module_path, module in model.named_modules():
                for buffer_key in module._buffers:
                    buffer_name = plain_name(
                        f"{module_path}.{buffer_key}" if module_path else buffer_key
                    )
                    self._slots.append(
                        (f"{model_number}/{buffer_name}", module._buffers, buffer_key)
                    )


def _tensor_version(tensor: Tensor) -> int:
    """Return the number of changes in place; 0 for a tensor made in inference mode, which does not count them."""
    return 0 if tensor.is_inference() else tensor._version
