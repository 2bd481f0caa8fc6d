"""ProcessGroupComm: collectives on a torch.distributed process group (gloo, NCCL and others)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.comm.barrier import RollCall
from hasten.comm.base import ReduceKind
from hasten.comm.collective_log import CollectiveRecord
from hasten.comm.contract import Contract
from hasten.comm.envelopes import envelopes_of
from hasten.comm.objects import Objects
from hasten.comm.session import Credentials, Session
from hasten.errors import CommError

# torch<2.13 has only the older name of this function; 2.13 warns about it
_GATHER: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_NARROW: Final = (torch.int16, torch.uint16, torch.uint32)


class ProcessGroupComm:
    """A torch process group with its key-value store.

    With `checked`, the members compare every collective over the store before it runs.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: dist.Store,
        device: torch.device,
        timeout_s: float = 1800.0,
        credentials: Credentials | None = None,
        collectives: CollectiveRecord | None = None,
        checked: bool = False,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.device = device
        self.group = group
        self.envelopes = envelopes_of(group)
        self.store = store
        self.credentials = credentials or Credentials()
        self.collectives = collectives or CollectiveRecord()
        self._timeout_s = timeout_s
        self._objects = Objects(self, self.credentials)
        self._wire: dist.ProcessGroup | None = None
        """Group that exchanges tensors in host memory."""
        self._device_types = _device_types(group)
        self._readable = device if device.type in self._device_types else torch.device("cpu")
        """Device for tensors that the backends cannot read: the group's device, or host memory if they cannot read that either."""
        me = self.ranks[self.rank]
        # Communicators are created in the same order on every member, so a per-rank count numbers them equally.
        number = store.add(f"hasten/made/{_tag(self.ranks)}/{me}", 1)
        self._name = f"{_tag(self.ranks)}/{number}"
        notes = dist.PrefixStore(f"hasten/{self._name}", store)
        self._roll_call = RollCall(notes, me, self.ranks, timeout_s)
        agreed = dist.PrefixStore("contract", notes)
        self._contract = Contract(agreed, me, self.ranks, timeout_s) if checked else None

    def all_reduce(self, x: Tensor, kind: ReduceKind = "sum") -> Tensor:
        if x.is_complex():
            return torch.view_as_complex(self.all_reduce(torch.view_as_real(x), kind))
        if x.dtype == torch.bool:
            counted = self.all_reduce(x.to(torch.int64), kind)
            return counted.bool() if kind in ("min", "max") else counted
        if x.dtype in _NARROW:  # gloo cannot reduce these
            return self.all_reduce(x.to(torch.int64), kind).to(torch.float32 if kind == "mean" else x.dtype)
        self._begin("all_reduce", x)
        buffer = self._own(x, copy=True)
        op = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}.get(kind, dist.ReduceOp.SUM)
        dist.all_reduce(buffer, op, group=self.group)
        self.collectives.ended()
        result = buffer / self.size if kind == "mean" else buffer
        return result.to(x.device).reshape(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        self._begin("all_gather", x)
        if x.dtype == torch.uint8 and x.ndim == 1 and x.is_contiguous() and x.device.type in self._device_types:
            gathered = x.new_empty(self.size * x.shape[0])  # bytes already: the envelope of every collective on trees
            _GATHER(gathered, x, group=self.group)
            self.collectives.ended()
            return gathered.view(self.size, -1) if x.shape[0] else gathered.reshape(self.size, 0)
        raw = self._bytes(x)
        out = raw.new_empty(self.size * raw.numel())
        _GATHER(out, raw, group=self.group)
        self.collectives.ended()
        return _from_bytes(out, x.dtype, (self.size, *x.shape)).to(x.device)

    def all_gather_bytes(self, x: Tensor, out: Tensor) -> None:
        if "cpu" not in self._device_types:
            out.copy_(self.all_gather(x).flatten())
            return
        self._begin("all_gather", x)
        _GATHER(out, x, group=self.group)
        self.collectives.ended()

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        self._begin("broadcast", x)
        raw = self._bytes(x).clone()
        dist.broadcast(raw, src=self._member(src), group=self.group)
        self.collectives.ended()
        return _from_bytes(raw, x.dtype, x.shape).to(x.device)

    def scatter(self, parts: Sequence[Tensor] | None, like: Tensor, src: int = 0) -> Tensor:
        sender = self._member(src)
        self._begin("scatter", like)
        raw = torch.empty_like(self._bytes(like))
        pieces = [self._bytes(part) for part in parts] if self.rank == src and parts is not None else None
        dist.scatter(raw, pieces, src=sender, group=self.group)
        self.collectives.ended()
        return _from_bytes(raw, like.dtype, like.shape).to(like.device)

    def all_gather_object(self, obj: Any) -> list[Any]:  # Any: the caller's objects
        return self._objects.all_gather(obj)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:  # Any: the caller's objects
        self._member(src)
        return self._objects.broadcast(obj, src)

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        self.collectives.note("exchange")
        if self._wire is None:
            same = "cpu" in self._device_types
            limit = timedelta(seconds=self._timeout_s)
            self._wire = self.group if same else dist.new_group(list(self.ranks), backend="gloo", timeout=limit)
        ways = ((dist.isend, sends), (dist.irecv, receives))
        begun = [begin(x, self._member(at), group=self._wire) for begin, list_ in ways for at, x in list_]
        for work in begun:
            if work is not None:
                work.wait()
        self.collectives.ended()

    def session(self) -> Session:
        return self._objects.session()

    def barrier(self, label: str, timeout_s: float | None = None) -> None:
        self.collectives.note("barrier", group=self._name)
        self._roll_call.wait(label, timeout_s)
        self.collectives.ended()

    def twin(self) -> ProcessGroupComm:
        group = dist.new_group(
            list(self.ranks), timeout=timedelta(seconds=self._timeout_s), use_local_synchronization=True
        )
        return ProcessGroupComm(group, self.store, self.device, self._timeout_s, self.credentials)

    def close(self) -> None:
        """Destroy the group. Called only by its owner."""
        dist.destroy_process_group(self.group)

    def _begin(self, op: str, x: Tensor) -> None:
        """Record the collective; in debug mode block until every member is about to run it."""
        self.collectives.note(op, x)
        if self._contract is not None and (last := self.collectives.last) is not None:
            self._contract.check(op, x, last.file, last.line)

    def _member(self, src: int) -> int:
        if not 0 <= src < self.size:
            raise CommError(f"src={src} is not a position in a group of {self.size}; use 0 to {self.size - 1}.")
        return self.ranks[src]

    def _own(self, x: Tensor, copy: bool = False) -> Tensor:
        """Return a contiguous tensor on a device that the backend can read; with `copy`, a private copy."""
        if x.device.type not in self._device_types:
            return x.detach().to(self._readable).contiguous()
        y = x.detach().contiguous()
        return y.clone() if copy and y.data_ptr() == x.data_ptr() else y

    def _bytes(self, x: Tensor) -> Tensor:
        """Return the tensor's raw bytes, which every backend can move for every dtype."""
        y = self._own(x)
        y = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y.resolve_neg()
        return y.reshape(-1).view(torch.uint8)


def _from_bytes(raw: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if dtype.is_complex:
        real = torch.empty((), dtype=dtype).real.dtype
        return torch.view_as_complex(raw.view(real).reshape(*shape, 2))
    return raw.view(dtype).reshape(tuple(shape))


def _device_types(group: dist.ProcessGroup) -> frozenset[str]:
    """Return the device types whose tensors the group's backends accept, such as {"cpu", "cuda"}."""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    return frozenset(part.partition(":")[0] for part in str(config).split(",") if ":" in part)


def _tag(ranks: Sequence[int]) -> str:
    return f"{len(ranks)}-{hash(tuple(ranks)) & 0xFFFFFFFF:x}"  # hashes of int tuples are the same in every process
