"""Limit of the device memory that fetched state may use."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import torch

_USABLE_FRACTION: Final = (
    0.95  # of the memory of a device; allocators lose a part to gaps
)


class MemoryUse(Protocol):
    """Count of the memory of tensors on a device."""

    def now_and_most(self) -> tuple[int, int]:
        """Return the bytes that tensors occupy now, and at most so far."""
        ...

    def capacity(self) -> int:
        """Return the bytes that tensors may occupy together."""
        ...


class _CudaMemoryUse:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now_and_most(self) -> tuple[int, int]:
        memory_stats = torch.cuda.memory_stats_as_nested_dict(self._device)[
            "allocated_bytes"
        ]["all"]
        return memory_stats["current"], memory_stats["peak"]

    def capacity(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(_USABLE_FRACTION * (free + torch.cuda.memory_reserved(self._device)))


def count_memory(device: torch.device) -> MemoryUse | None:
    """Return the count of the memory of tensors on the device; None where torch does not count it."""
    return _CudaMemoryUse(device) if device.type == "cuda" else None


class MemoryBudget:
    """Limit of the device memory for fetched state: a fixed part, and what is free below the peak of the first step.

    The memory use of a step, sampled where blocks begin and gradients arrive, predicts that of the next one, so that fetched state fills what
    activations leave free. Between the last block and the first gradient, where the loss is computed, there is no sample: what is held then
    may raise the peak of the run, but not beyond the memory of the device.
    """

    def __init__(self, floor_bytes: int, use: MemoryUse | None) -> None:
        self.floor_bytes = floor_bytes
        self._use = use
        self._peak = 0
        self._samples: list[_Sample] = []
        self._previous: list[_Sample] = []
        self._updated = False

    def record_use(self, held_bytes: int, in_forward: bool = False) -> None:
        """Record the current memory use; `held` bytes of it are fetched state."""
        if self._use is not None:
            used_bytes, peak_bytes = self._use.now_and_most()
            self._samples.append(_Sample(used_bytes - held_bytes, in_forward))
            self._peak = max(
                self._peak, used_bytes - held_bytes, 0 if self._updated else peak_bytes
            )

    def end_step(self) -> None:
        """Take the samples since the last call as the prediction for the next step."""
        self._previous = self._samples
        self._samples = []
        self._updated = True

    def fits_ahead(self, held_bytes: int, more_bytes: int) -> bool:
        """Return whether `more` bytes may be fetched during the backward, beside `held` ones."""
        coming_samples = [
            sample.used for sample in self._previous[max(len(self._samples) - 1, 0) :]
        ]
        return held_bytes + more_bytes <= self.floor_bytes or (
            bool(coming_samples)
            and self._fits_beside(held_bytes, more_bytes, max(coming_samples))
        )

    def fits_in_update(self, held_bytes: int, more_bytes: int) -> bool:
        """Return whether `more` bytes may be fetched during the update, beside `held` ones."""
        return held_bytes + more_bytes <= self.floor_bytes or self._fits_beside(
            held_bytes, more_bytes, 0
        )

    def is_tight(self, held_bytes: int) -> bool:
        """Return whether the next block, or the loss after it, may need memory of the `held` bytes beyond the fixed part."""
        if self._use is None or held_bytes <= self.floor_bytes:
            return held_bytes > self.floor_bytes
        num_samples = len(self._samples)
        samples_before = self._previous[max(num_samples - 1, 0) : num_samples]
        coming_samples = self._previous[num_samples:][:1]
        loss_follows = (
            not coming_samples
            or not coming_samples[0].in_forward
            or bool(samples_before and coming_samples[0].used < samples_before[0].used)
        )
        if loss_follows and self._peak + held_bytes > self._use.capacity():
            return True
        if coming_samples:
            coming_bytes = coming_samples[0].used
        else:
            coming_bytes = self._peak
        return not self._fits_beside(held_bytes, 0, coming_bytes)

    def _fits_beside(self, held_bytes: int, more_bytes: int, coming_bytes: int) -> bool:
        if self._use is None:
            return False
        return (
            max(self._use.now_and_most()[0] - held_bytes, coming_bytes)
            + held_bytes
            + more_bytes
            <= self._peak
        )


class _Sample(NamedTuple):
    used: int
    """Bytes of tensors without fetched state."""
    in_forward: bool
