"""Transfer of hidden states and results between the ranks of a pipeline, outside of a schedule."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from hasten import trees
from hasten.comm.process_group import ProcessGroupComm
from hasten.errors import StepError

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HEADER: Final = 12
_FAILED: Final = -1


class StageWire:
    """Point-to-point transfer of tensors whose shape the receiver does not know, between positions of a group."""

    def __init__(self, comm: ProcessGroupComm) -> None:
        self._comm = comm
        self._flying: list[tuple[Any, Tensor]] = []  # Any: torch's work handles

    def send(self, hidden: Tensor | None, to: int) -> None:
        """Send a tensor, or None for a failed stage, without waiting."""
        header = torch.zeros(_HEADER, dtype=torch.int64)
        if hidden is None:
            header[0] = _FAILED
        else:
            if hidden.dtype not in _DTYPES or hidden.ndim > _HEADER - 2:
                raise StepError(
                    f"a block returned a tensor of dtype {hidden.dtype} with {hidden.ndim} dimensions, which cannot be sent between "
                    "pipeline stages. Hidden states must be floating point tensors."
                )
            header[0], header[1] = _DTYPES.index(hidden.dtype), hidden.ndim
            header[2 : 2 + hidden.ndim] = torch.tensor(hidden.shape)
        self._put(header.to(self._comm.device), to)
        if hidden is not None:
            self._put(hidden.detach().contiguous(), to)

    def _put(self, tensor: Tensor, to: int) -> None:
        work = dist.isend(tensor, self._comm.ranks[to], group=self._comm.group)
        self._flying.append((work, tensor))

    def receive(self, sender: int) -> Tensor | None:
        """Return the received tensor; None if the sending stage failed."""
        source = self._comm.ranks[sender]
        header = torch.zeros(_HEADER, dtype=torch.int64, device=self._comm.device)
        dist.recv(header, source, group=self._comm.group)
        kind, ndim, *shape = header.tolist()
        if kind == _FAILED:
            return None
        hidden = torch.empty(shape[:ndim], dtype=_DTYPES[kind], device=self._comm.device)
        dist.recv(hidden, source, group=self._comm.group)
        return hidden

    def settle(self) -> None:
        """Wait for all sends."""
        for work, _ in self._flying:
            work.wait()
        self._flying.clear()


def share(result: Any, comm: ProcessGroupComm, source: int) -> Any:  # Any: the model's output
    """Broadcast a result from one rank to the group: tensors directly, containers as plain values.

    Raises: StepError for containers other than tuples, lists, dicts and model outputs.
    """
    spec: Any = None
    if comm.rank == source:
        try:
            spec = _describe(result)
        except StepError as error:
            spec = str(error)
    spec = comm.broadcast_object(spec, source)
    if isinstance(spec, str):
        raise StepError(spec)
    mine = iter(trees.tensors(result)) if comm.rank == source else iter(())

    def fetch(shape: list[int], dtype: str) -> Tensor:
        own = next(mine, None)
        like = own.detach() if own is not None else torch.empty(shape, dtype=getattr(torch, dtype), device=comm.device)
        return comm.broadcast(like, source)

    made = _rebuild(spec, fetch)
    return result if comm.rank == source else made


def _describe(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return {"tensor": [list(tree.shape), str(tree.dtype).removeprefix("torch.")]}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return {"value": tree}
    kind = type(tree)
    if kind in (list, tuple):
        return {kind.__name__: [_describe(part) for part in tree]}
    if isinstance(tree, dict):  # transformers' outputs are subclasses of dict
        of = {str(key): _describe(part) for key, part in tree.items()}
        return {"dict": of} if kind is dict else {"output": [kind.__module__, kind.__qualname__, of]}
    raise StepError(
        f"the model returned a {kind.__name__}, which cannot be sent to the other pipeline stages. Return tensors, or "
        "tuples, lists and dicts of them."
    )


def _rebuild(spec: Any, fetch: Callable[[list[int], str], Tensor]) -> Any:
    ((kind, of),) = spec.items()
    match kind:
        case "tensor":
            return fetch(*of)
        case "value":
            return of
        case "list":
            return [_rebuild(part, fetch) for part in of]
        case "tuple":
            return tuple(_rebuild(part, fetch) for part in of)
        case "dict":
            return {key: _rebuild(part, fetch) for key, part in of.items()}
    module, name, parts = of
    return _loaded(module, name)(**{key: _rebuild(part, fetch) for key, part in parts.items()})


def _loaded(module: str, name: str) -> Any:
    """Return a class that this process has imported, as the model that returns its instances has."""
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return found
