"""The state before a load: previous values of everything that changes, restored in reverse order on failure."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from hasten import trees
from hasten.checkpoint.reshard import Copy, run_copies
from hasten.modules.names import is_dtensor, local_tensor
from hasten.runtime.devices import empty_cache, free_memory
from hasten.runtime.logs import get_logger

log = get_logger(__name__)

_SPARE_BYTES = 1024**3
"""Device memory that saving old values leaves free for other allocations of the load."""


class Stateful(Protocol):
    """Object with state: registered objects, loaders, schedulers, trackers."""

    def state_dict(self) -> Any: ...  # Any: plain values and tensors

    def load_state_dict(self, state: Any) -> Any: ...


class PreviousState:
    """Context manager that restores saved values when its block fails; call `save_...` before changing an object."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, Callable[[], object]]] = []
        self._free_bytes: dict[torch.device, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        steps, self._steps = self._steps, []
        devices, self._free_bytes = self._free_bytes, {}
        if error is None:
            steps.clear()
            for device in devices:
                empty_cache(device)  # the old values were in memory that training does not use
            return
        for what, step in reversed(steps):
            try:
                with torch.no_grad():
                    step()
            except Exception as problem:  # the other objects must be restored nevertheless
                text = f"{what} could not be restored to its state before loading: {type(problem).__name__}: {problem}"
                log.error(text, main_process_only=False)
                error.add_note(text)

    def add(self, what: str, step: Callable[[], object]) -> None:
        """Call `step` when the block fails."""
        self._steps.append((what, step))

    def save_stateful(self, thing: Stateful) -> None:
        """Save an object by its state_dict; tensors are copied to host memory."""
        before = _copied(thing.state_dict())
        self.add(type(thing).__name__, lambda: thing.load_state_dict(trees.map_leaves(_on_device, before)))

    def save_attributes(self, thing: Any, tensors: bool = True) -> None:
        """Save an object's attributes and the content of their containers; `tensors` also copies their tensors."""
        before: dict[str, Any] = {}
        contents: list[tuple[Any, Any]] = []
        # objects without a __dict__ are dataclasses of hasten
        for name in list(vars(thing) if hasattr(thing, "__dict__") else thing.__dataclass_fields__):
            before[name] = getattr(thing, name)
            _add_contents(before[name], tensors, contents)
        self.add(type(thing).__name__, partial(_restore, thing, before, contents))

    def save_targets(self, copies: Sequence[Copy]) -> None:
        """Save the memory that these copies will overwrite: on its device if there is space, else on the host."""
        save, restore = [], []
        for copy_ in copies:
            memory = self._memory_like(copy_.target)
            save.append(Copy(memory, copy_.target))
            restore.append(Copy(copy_.target, memory))
        if save:
            run_copies(save)
            self.add("tensors", partial(run_copies, restore))

    def _memory_like(self, target: Tensor) -> Tensor:
        """Allocate memory for a tensor's old values."""
        if type(target) is not Tensor and not isinstance(target, torch.nn.Parameter):
            return target.detach().clone()  # subclasses define how they are copied
        if target.device.type != "cpu":
            if target.device not in self._free_bytes:
                self._free_bytes[target.device] = free_memory(target.device) - _SPARE_BYTES
            size = target.numel() * target.element_size()
            if size <= self._free_bytes[target.device]:
                self._free_bytes[target.device] -= size
                try:
                    return torch.empty_like(target, requires_grad=False)
                except torch.OutOfMemoryError:
                    self._free_bytes[target.device] = 0
        return torch.empty_like(target, device="cpu", requires_grad=False)


class _HostCopy:
    """A copy of a tensor in host memory, with the device it came from."""

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        self.copy = tensor.detach().clone() if is_dtensor(tensor) else tensor.detach().to("cpu", copy=True)


def _copied(value: Any) -> Any:  # Any: a value of the user's state
    """Return a deep copy of nested state, with tensors in host memory."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return _HostCopy(value)
    if type(value) is dict:
        return dict(zip(value, map(_copied, value.values()), strict=True))
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return trees.map_leaves(_copied, value) if trees.is_container(value) else copy.deepcopy(value)


def _on_device(leaf: Any) -> Any:
    """Return a separate copy of a saved tensor on its device; other values unchanged."""
    if not isinstance(leaf, _HostCopy):
        return leaf
    return leaf.copy.clone() if is_dtensor(leaf.copy) else leaf.copy.to(leaf.device, copy=True)


def _add_contents(value: Any, tensors: bool, contents: list[tuple[Any, Any]]) -> None:
    """Add copies of the content of containers (recursively) and of tensors; outer containers come first."""
    if isinstance(value, Tensor):
        if tensors:
            contents.append((value, local_tensor(value).detach().clone()))
    elif isinstance(value, (dict, collections.UserDict)):
        contents.append((value, dict(value)))
        for item in value.values():
            _add_contents(item, tensors, contents)
    elif isinstance(value, (list, collections.deque)):
        contents.append((value, list(value)))
        for item in value:
            _add_contents(item, tensors, contents)
    elif isinstance(value, set):
        contents.append((value, set(value)))


def _restore(thing: Any, before: dict[str, Any], contents: Sequence[tuple[Any, Any]]) -> None:
    """Restore an object's attributes, and the content of their containers and tensors in place."""
    if hasattr(thing, "__dict__"):
        thing.__dict__.clear()
        thing.__dict__.update(before)
    else:
        for name, value in before.items():
            setattr(thing, name, value)
    for container, content in contents:
        if isinstance(container, Tensor):
            local_tensor(container).detach().copy_(content)
        else:
            container.clear()
            (container.extend if isinstance(content, list) else container.update)(content)
