"""What autograd keeps of a forward, by place: inside blocks, and what tensor parallelism would divide."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hasten.tools.tune.watch import StepWatch
from hasten.trees import tensors


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The parts of a model that the planner distinguishes, by identity."""

    blocks: frozenset[int] = frozenset()
    block_classes: tuple[str, ...] = ()
    by_rows: frozenset[int] = frozenset()
    """Layers that tensor parallelism splits by rows: their inputs are divided."""


@dataclass(slots=True)
class Saved:
    """Bytes kept for backward, and the sizes of what flows through blocks."""

    total: int = 0
    in_blocks: int = 0
    split: int = 0
    width: int = 0
    sequence: int = 1
    key_width: int = 0


@dataclass(slots=True)
class SavedNotes:
    """Takes notes while a forward runs."""

    watch: StepWatch
    anatomy: Anatomy
    saved: Saved = field(default_factory=Saved)
    _seen: dict[int, weakref.ref[Any]] = field(
        default_factory=dict
    )  # Any: storages; to hold them would change the peak

    def attention(self, flops: float, key_width: int, dtype: str) -> None:
        """Note an attention: its forward, and a backward with two and a half times as many operations."""
        self.watch.count(3.5 * flops, dtype)
        self.saved.key_width = key_width

    def entered(self, module: nn.Module, args: object, kwargs: object = None) -> None:
        """Note the shape of what the first block is given."""
        if self.saved.width == 0 and id(module) in self.anatomy.blocks:
            first = next((value for value in tensors([args, kwargs]) if value.is_floating_point()), None)
            if first is not None and first.dim() >= 2:
                self.saved.width = first.shape[-1]
                self.saved.sequence = first.shape[-2] if first.dim() > 2 else 1

    def save(self, tensor: Tensor) -> Tensor:
        """Note a tensor that autograd keeps."""
        storage = tensor.untyped_storage()
        known = self._seen.get(id(storage))
        if (known is not None and known() is storage) or self.watch.is_parameter(tensor):
            return tensor
        self._seen[id(storage)] = weakref.ref(storage)
        num_bytes = storage.nbytes()
        self.saved.total += num_bytes
        if any(id(module) in self.anatomy.blocks for module in self.watch.stack):
            self.saved.in_blocks += num_bytes
            if self._is_divided(tensor):
                self.saved.split += num_bytes
        return tensor

    def _is_divided(self, tensor: Tensor) -> bool:
        """Whether tensor parallelism divides it: what blocks pass on stays whole, what split layers exchange does not."""
        if self.watch.stack and id(self.watch.stack[-1]) in self.anatomy.by_rows:
            return True
        return tensor.dim() > 3 or tensor.shape[-1:] != (self.saved.width,)
