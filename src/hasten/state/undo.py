"""Rollback of a failed load: previous values, restored in reverse order."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from hasten import trees
from hasten.checkpoint.filling import run_copies
from hasten.checkpoint.reshard import Copy, local_tensor
from hasten.modules.names import is_dtensor
from hasten.runtime.devices import empty_cache, free_memory
from hasten.runtime.logs import get_logger

log = get_logger(__name__)

_SPARE_BYTES = 1024**3
"""Device memory that saving old values leaves free for other allocations of the load."""


class Stateful(Protocol):
    """Object with state: registered objects, loaders, schedulers, trackers."""

    def state_dict(self) -> Any: ...  # Any: plain values and tensors

    def load_state_dict(self, state: Any) -> Any: ...


class Undo:
    """Context manager that rolls back changes when its block fails; call `keep_...` before changing an object."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, Callable[[], object]]] = []
        self._room: dict[torch.device, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        steps, self._steps = self._steps, []
        devices, self._room = self._room, {}
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
                text = (
                    f"{what} could not be put back to what it was before loading: {type(problem).__name__}: {problem}"
                )
                log.error(text, main_process_only=False)
                error.add_note(text)

    def add(self, what: str, step: Callable[[], object]) -> None:
        """Call `step` when the block fails."""
        self._steps.append((what, step))

    def keep_stateful(self, thing: Stateful) -> None:
        """Save an object by its state_dict; tensors are copied to host memory."""
        before = trees.map_leaves(_kept, thing.state_dict())
        self.add(type(thing).__name__, lambda: thing.load_state_dict(trees.map_leaves(_thawed, before)))

    def keep_attributes(self, thing: object, tensors: bool = True) -> None:
        """Save an object's attributes and the content of their containers; `tensors` also copies their tensors."""
        self.add(type(thing).__name__, _keep_attributes(thing, tensors))

    def keep_targets(self, copies: Sequence[Copy]) -> None:
        """Save the memory that these copies will overwrite: on its device if there is space, else on the host."""
        back = [Copy(one.target, self._memory_like(one.target)) for one in copies]
        run_copies([Copy(one.source, one.target) for one in back])
        self.add("tensors", lambda: run_copies(back))

    def _memory_like(self, target: Tensor) -> Tensor:
        """Allocate memory for a tensor's old values."""
        if type(target) is not Tensor and not isinstance(target, torch.nn.Parameter):
            return target.detach().clone()  # subclasses define how they are copied
        if target.device.type != "cpu":
            if target.device not in self._room:
                self._room[target.device] = free_memory(target.device) - _SPARE_BYTES
            size = target.numel() * target.element_size()
            if size <= self._room[target.device]:
                self._room[target.device] -= size
                try:
                    return torch.empty_like(target, requires_grad=False)
                except torch.OutOfMemoryError:
                    self._room[target.device] = 0
        return torch.empty_like(target, device="cpu", requires_grad=False)


class _Kept:
    """A copy of a tensor in host memory, with the device it came from."""

    def __init__(self, tensor: Tensor) -> None:
        spread = is_dtensor(tensor)
        self.device = tensor.device
        self.copy = tensor.detach().clone() if spread else tensor.detach().to("cpu", copy=True)

    def thawed(self) -> Tensor:
        """Return a separate copy of the tensor on its device."""
        return self.copy.clone() if is_dtensor(self.copy) else self.copy.to(self.device, copy=True)


def _kept(leaf: Any) -> Any:  # Any: a value of the user's state
    return _Kept(leaf) if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


def _thawed(leaf: Any) -> Any:
    return leaf.thawed() if isinstance(leaf, _Kept) else leaf


def _keep_attributes(thing: object, tensors: bool) -> Callable[[], None]:
    names = list(vars(thing)) if hasattr(thing, "__dict__") else [f.name for f in dataclasses.fields(thing)]  # type: ignore[arg-type]  # objects without a dict are our dataclasses
    before = {name: getattr(thing, name) for name in names}
    inner = [_keep_inside(value, tensors) for value in before.values()]

    def put_back() -> None:
        if hasattr(thing, "__dict__"):
            thing.__dict__.clear()
            thing.__dict__.update(before)
        else:
            for name, value in before.items():
                setattr(thing, name, value)
        for step in inner:
            step()

    return put_back


def _keep_inside(value: Any, tensors: bool) -> Callable[[], None]:
    """Return a function that restores the content of a container (recursively), or the values of a tensor, in place."""
    if isinstance(value, Tensor):
        return _keep_tensor(value) if tensors else _nothing
    if isinstance(value, (dict, collections.UserDict)):
        return _keep_content(value, dict(value), [_keep_inside(item, tensors) for item in value.values()])
    if isinstance(value, (list, collections.deque)):
        return _keep_content(value, list(value), [_keep_inside(item, tensors) for item in value])
    return _keep_content(value, set(value), []) if isinstance(value, set) else _nothing


def _keep_content(container: Any, content: Any, inner: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def put_back() -> None:
        container.clear()
        (container.extend if isinstance(content, list) else container.update)(content)
        for step in inner:
            step()

    return put_back


def _keep_tensor(value: Tensor) -> Callable[[], None]:
    kept = local_tensor(value).detach().clone()

    def put_back() -> None:
        local_tensor(value).detach().copy_(kept)

    return put_back


def _nothing() -> None:
    """Do nothing: the value cannot change, or is saved elsewhere."""
