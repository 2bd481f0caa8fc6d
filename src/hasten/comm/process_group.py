"""ProcessGroupComm: collectives on a torch.distributed process group (gloo, NCCL and others)."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistNetworkError, Store

from hasten.comm.base import ReduceKind
from hasten.comm.collective_log import CollectiveRecord
from hasten.comm.encoding import PLAIN, Codec
from hasten.errors import CommError, MissingRanksError, PeerFailedError

log = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.02
_TELL_AFTER_S = 30.0


class RollCall:
    """Numbered check-ins of a fixed set of ranks; each rank calls `wait` in the same order."""

    def __init__(
        self, store: Store, rank: int, ranks: Sequence[int], timeout_s: float
    ) -> None:
        self._store = store
        self._rank = rank
        self._ranks = tuple(ranks)
        self._timeout_s = timeout_s
        self._turn = 0

    def wait(self, label: str, timeout_s: float | None = None) -> None:
        """Block until every rank has checked in with this label."""
        self._turn += 1
        limit = self._timeout_s if timeout_s is None else timeout_s
        started = time.monotonic()
        try:
            self._check_in(self._turn, label, limit, started)
        except DistNetworkError as error:
            raise PeerFailedError(
                f"rank {self._rank} lost the group's store after {time.monotonic() - started:.1f} s at {label!r}: the process that serves it "
                f"(rank 0, or the launcher of machine 0) has ended, so ranks {list(self._ranks)} cannot meet any more. Look for the error that "
                "ended it; this rank only noticed."
            ) from error

    def _check_in(self, turn: int, label: str, limit: float, started: float) -> None:
        store = self._store
        store.set(f"{turn}/{self._rank}", label)
        if store.add(f"{turn}/count/{label}", 1) == len(self._ranks):
            store.set(f"{turn}/open", "1")
            self._forget(turn - 1, label)
            return
        pause, is_reported = _FIRST_PAUSE_S, False
        while not store.check([f"{turn}/open"]):
            waited = time.monotonic() - started
            if waited > limit:
                raise self._missing(turn, label, limit)
            if waited > _TELL_AFTER_S and not is_reported:
                is_reported = True
                missing, text = self._whereabouts(turn, label)
                if self._rank == next(
                    rank for rank in self._ranks if rank not in missing
                ):  # one logs for all waiting ranks
                    log.warning(
                        "rank %d has waited %.0f s at %r: %s",
                        self._rank,
                        waited,
                        label,
                        text,
                    )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)

    def _whereabouts(self, turn: int, label: str) -> tuple[tuple[int, ...], str]:
        absent, elsewhere = [], []
        for rank in self._ranks:
            if not self._store.check([f"{turn}/{rank}"]):
                absent.append(rank)
            elif (other := self._store.get(f"{turn}/{rank}").decode()) != label:
                elsewhere.append((rank, other))
        parts = [f"rank {rank} has not arrived" for rank in absent]
        parts += [f"rank {rank} is at {other!r} instead" for rank, other in elsewhere]
        return (*absent, *(rank for rank, _ in elsewhere)), "; ".join(
            parts
        ) or "everyone has arrived"

    def _missing(self, turn: int, label: str, limit: float) -> MissingRanksError:
        missing, text = self._whereabouts(turn, label)
        return MissingRanksError(
            f"rank {self._rank} waited {limit:g} s at {label!r} and not all of ranks {list(self._ranks)} came: {text}. "
            "Every rank must make this call: move it out of `if is_main_process:` blocks, or look for the error "
            "that stopped the missing ranks.",
            missing,
        )

    def _forget(self, turn: int, label: str) -> None:
        # Every rank has passed the previous turn, so its keys can be deleted; a different label of that turn is not
        # known here, which leaves at most one small counter behind.
        if turn < 1:
            return
        for key in (
            f"{turn}/open",
            f"{turn}/count/{label}",
            *(f"{turn}/{rank}" for rank in self._ranks),
        ):
            self._store.delete_key(key)


# Any in this file: the caller's objects.
_OBJECT, _ERROR = b"o", b"e"


def _message_of(obj: Any, codec: Codec) -> tuple[bytes, CommError | None]:
    """Return the object as bytes; one that cannot be sent is replaced by its error, which the waiting members raise too."""
    try:
        return _OBJECT + codec.encode(obj), None
    except CommError as error:
        return _ERROR + str(error).encode(), error


def _object_of(message: bytes, codec: Codec) -> Any:
    if message[:1] == _ERROR:
        raise CommError(message[1:].decode(errors="replace"))
    return codec.decode(message[1:])


def _padded(message: bytes, length: int) -> Tensor:
    return torch.frombuffer(bytearray(message.ljust(length, b"\0")), dtype=torch.uint8)


# torch<2.13 has only the older name of this function; 2.13 warns about it
_GATHER: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_NARROW: Final = (torch.int16, torch.uint16, torch.uint32)


class ProcessGroupComm:
    """A torch process group with its key-value store."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: dist.Store,
        device: torch.device,
        timeout_s: float = 1800.0,
        codec: Codec = PLAIN,
        collectives: CollectiveRecord | None = None,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.device = device
        self.group = group
        self.store = store
        self.codec = codec
        self.collectives = collectives or CollectiveRecord()
        self._timeout_s = timeout_s
        self._wire: dist.ProcessGroup | None = None
        """Group that exchanges tensors in host memory."""
        self._device_types = _device_types(group)
        self._readable = (
            device if device.type in self._device_types else torch.device("cpu")
        )
        """Device for tensors that the backends cannot read: the group's device, or host memory if they cannot read that either."""
        me = self.ranks[self.rank]
        # Communicators are created in the same order on every member, so a per-rank count numbers them equally.
        number = store.add(f"hasten/made/{_tag(self.ranks)}/{me}", 1)
        self._name = f"{_tag(self.ranks)}/{number}"
        notes = dist.PrefixStore(f"hasten/{self._name}", store)
        self._roll_call = RollCall(notes, me, self.ranks, timeout_s)

    def all_reduce(self, x: Tensor, kind: ReduceKind = "sum") -> Tensor:
        if x.is_complex():
            return torch.view_as_complex(self.all_reduce(torch.view_as_real(x), kind))
        if x.dtype == torch.bool:
            counted = self.all_reduce(x.to(torch.int64), kind)
            return counted.bool() if kind in ("min", "max") else counted
        if x.dtype in _NARROW:  # gloo cannot reduce these
            return self.all_reduce(x.to(torch.int64), kind).to(
                torch.float32 if kind == "mean" else x.dtype
            )
        self.collectives.note("all_reduce", x)
        buffer = self._on_backend(x).clone()
        op = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}.get(
            kind, dist.ReduceOp.SUM
        )
        dist.all_reduce(buffer, op, group=self.group)
        self.collectives.ended()
        result = buffer / self.size if kind == "mean" else buffer
        return result.to(x.device).reshape(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        self.collectives.note("all_gather", x)
        raw = self._bytes(x)
        out = raw.new_empty(self.size * raw.numel())
        _GATHER(out, raw, group=self.group)
        self.collectives.ended()
        return _from_bytes(out, x.dtype, (self.size, *x.shape)).to(x.device)

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        self.collectives.note("broadcast", x)
        raw = self._bytes(x).clone()
        dist.broadcast(raw, src=self._member(src), group=self.group)
        self.collectives.ended()
        return _from_bytes(raw, x.dtype, x.shape).to(x.device)

    def scatter(
        self, parts: Sequence[Tensor] | None, like: Tensor, src: int = 0
    ) -> Tensor:
        sender = self._member(src)
        self.collectives.note("scatter", like)
        raw = torch.empty_like(self._bytes(like))
        pieces = (
            [self._bytes(part) for part in parts]
            if self.rank == src and parts is not None
            else None
        )
        dist.scatter(raw, pieces, src=sender, group=self.group)
        self.collectives.ended()
        return _from_bytes(raw, like.dtype, like.shape).to(like.device)

    def all_gather_object(self, obj: Any) -> list[Any]:  # Any: the caller's objects
        message, error = _message_of(obj, self.codec)
        lengths = self.all_gather(torch.tensor(len(message))).tolist()
        rows = self.all_gather(_padded(message, max(lengths)))
        if error is not None:
            raise error
        messages = (
            row[:length].numpy().tobytes()
            for row, length in zip(rows, lengths, strict=True)
        )
        return [_object_of(message, self.codec) for message in messages]

    # Any: the caller's objects
    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        message, error = (
            _message_of(obj, self.codec) if self.rank == src else (b"", None)
        )
        length = int(self.broadcast(torch.tensor(len(message)), src))
        sent = self.broadcast(_padded(message, length), src)
        if error is not None:
            raise error
        return _object_of(sent.numpy().tobytes(), self.codec)

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
    ) -> None:
        self.collectives.note("exchange")
        if self._wire is None:
            same = "cpu" in self._device_types
            limit = timedelta(seconds=self._timeout_s)
            self._wire = (
                self.group
                if same
                else dist.new_group(list(self.ranks), backend="gloo", timeout=limit)
            )
        ways = ((dist.isend, sends), (dist.irecv, receives))
        begun = [
            begin(x, self._member(at), group=self._wire)
            for begin, list_ in ways
            for at, x in list_
        ]
        for work in begun:
            if work is not None:
                work.wait()
        self.collectives.ended()

    def barrier(self, label: str, timeout_s: float | None = None) -> None:
        self.collectives.note("barrier", group=self._name)
        self._roll_call.wait(label, timeout_s)
        self.collectives.ended()

    def twin(self) -> ProcessGroupComm:
        group = dist.new_group(
            list(self.ranks),
            timeout=timedelta(seconds=self._timeout_s),
            use_local_synchronization=True,
        )
        return ProcessGroupComm(
            group, self.store, self.device, self._timeout_s, self.codec
        )

    def close(self) -> None:
        """Destroy the group. Called only by its owner."""
        dist.destroy_process_group(self.group)

    def _member(self, src: int) -> int:
        if not 0 <= src < self.size:
            raise CommError(
                f"src={src} is not a position in a group of {self.size}; use 0 to {self.size - 1}."
            )
        return self.ranks[src]

    def _on_backend(self, x: Tensor) -> Tensor:
        """Return a contiguous tensor on a device that the backend can read."""
        device = x.device if x.device.type in self._device_types else self._readable
        return x.detach().to(device).contiguous()

    def _bytes(self, x: Tensor) -> Tensor:
        """Return the tensor's raw bytes, which every backend can move for every dtype."""
        y = self._on_backend(x)
        y = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y.resolve_neg()
        flat = y.reshape(-1)
        if flat.stride(0) != 1:  # one element of a column keeps the column's stride
            flat = torch.empty_like(flat, memory_format=torch.contiguous_format).copy_(
                flat
            )
        return flat.view(torch.uint8)


def _from_bytes(raw: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if dtype.is_complex:
        real = torch.empty((), dtype=dtype).real.dtype
        return torch.view_as_complex(raw.view(real).reshape(*shape, 2))
    return raw.view(dtype).reshape(tuple(shape))


def _device_types(group: dist.ProcessGroup) -> frozenset[str]:
    """Return the device types whose tensors the group's backends accept, such as {"cpu", "cuda"}."""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    return frozenset(
        part.partition(":")[0] for part in str(config).split(",") if ":" in part
    )


def _tag(ranks: Sequence[int]) -> str:
    # hashes of int tuples are the same in every process
    return f"{len(ranks)}-{hash(tuple(ranks)) & 0xFFFFFFFF:x}"
