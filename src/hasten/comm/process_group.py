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
_SHORTEST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.02
_REPORT_AFTER_S = 30.0


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
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        started_s = time.monotonic()
        try:
            self._check_in(self._turn, label, limit_s, started_s)
        except DistNetworkError as error:
            raise PeerFailedError(
                f"rank {self._rank} lost the group's store after {time.monotonic() - started_s:.1f} s at {label!r}: the process that serves it "
                f"(rank 0, or the launcher of machine 0) has ended, so ranks {list(self._ranks)} cannot meet any more. Look for the error that "
                "ended it; this rank only noticed."
            ) from error

    def _check_in(
        self, turn_number: int, label: str, limit_s: float, started_s: float
    ) -> None:
        store = self._store
        store.set(f"{turn_number}/{self._rank}", label)
        if store.add(f"{turn_number}/count/{label}", 1) == len(self._ranks):
            store.set(f"{turn_number}/open", "1")
            self._delete_keys(turn_number - 1, label)
            return
        pause_s = _SHORTEST_PAUSE_S
        is_reported = False
        while not store.check([f"{turn_number}/open"]):
            waited_s = time.monotonic() - started_s
            if waited_s > limit_s:
                raise self._missing_error(turn_number, label, limit_s)
            if waited_s > _REPORT_AFTER_S and not is_reported:
                is_reported = True
                missing_ranks, missing_text = self._locate_missing(turn_number, label)
                if self._rank == next(
                    rank for rank in self._ranks if rank not in missing_ranks
                ):  # one logs for all waiting ranks
                    log.warning(
                        "rank %d has waited %.0f s at %r: %s",
                        self._rank,
                        waited_s,
                        label,
                        missing_text,
                    )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)

    def _locate_missing(
        self, turn_number: int, label: str
    ) -> tuple[tuple[int, ...], str]:
        missing_ranks: list[int] = []
        rank_texts: list[str] = []
        for rank in self._ranks:
            rank_key = f"{turn_number}/{rank}"
            if not self._store.check([rank_key]):
                missing_ranks.append(rank)
                rank_texts.append(f"rank {rank} has not arrived")
                continue
            rank_label = self._store.get(rank_key).decode()
            if rank_label != label:
                missing_ranks.append(rank)
                rank_texts.append(f"rank {rank} is at {rank_label!r} instead")
        return tuple(missing_ranks), "; ".join(rank_texts) or "everyone has arrived"

    def _missing_error(
        self, turn_number: int, label: str, limit_s: float
    ) -> MissingRanksError:
        missing_ranks, missing_text = self._locate_missing(turn_number, label)
        return MissingRanksError(
            f"rank {self._rank} waited {limit_s:g} s at {label!r} and not all of ranks {list(self._ranks)} came: {missing_text}. "
            "Every rank must make this call: move it out of `if is_main_process:` blocks, or look for the error "
            "that stopped the missing ranks.",
            missing_ranks,
        )

    def _delete_keys(self, turn_number: int, label: str) -> None:
        # Every rank has passed the previous turn, so its keys can be deleted; a different label of that turn is not
        # known here, which leaves at most one small counter behind.
        if turn_number < 1:
            return
        for store_key in (
            f"{turn_number}/open",
            f"{turn_number}/count/{label}",
            *(f"{turn_number}/{rank}" for rank in self._ranks),
        ):
            self._store.delete_key(store_key)


# Any in this file: the caller's objects.
_OBJECT = b"o"
_ERROR = b"e"


def _message_of(python_object: Any, codec: Codec) -> tuple[bytes, CommError | None]:
    """Return the object as bytes; one that cannot be sent is replaced by its error, which the waiting members raise too."""
    try:
        return _OBJECT + codec.encode(python_object), None
    except CommError as error:
        return _ERROR + str(error).encode(), error


def _object_of(message: bytes, codec: Codec) -> Any:
    if message[:1] == _ERROR:
        raise CommError(message[1:].decode(errors="replace"))
    return codec.decode(message[1:])


def _padded_bytes(message: bytes, padded_length: int) -> Tensor:
    return torch.frombuffer(
        bytearray(message.ljust(padded_length, b"\0")), dtype=torch.uint8
    )


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
        self._host_group: dist.ProcessGroup | None = None
        """Group that exchanges tensors in host memory."""
        self._device_types = _device_types(group)
        if device.type in self._device_types:
            self._readable = device
        else:
            self._readable = torch.device("cpu")
        """Device for tensors that the backends cannot read: the group's device, or host memory if they cannot read that either."""
        global_rank = self.ranks[self.rank]
        # Communicators are created in the same order on every member, so a per-rank count numbers them equally.
        comm_number = store.add(
            f"hasten/made/{_group_tag(self.ranks)}/{global_rank}", 1
        )
        self._name = f"{_group_tag(self.ranks)}/{comm_number}"
        comm_store = dist.PrefixStore(f"hasten/{self._name}", store)
        self._roll_call = RollCall(comm_store, global_rank, self.ranks, timeout_s)

    def all_reduce(self, tensor: Tensor, kind: ReduceKind = "sum") -> Tensor:
        if tensor.is_complex():
            return torch.view_as_complex(
                self.all_reduce(torch.view_as_real(tensor), kind)
            )
        if tensor.dtype == torch.bool:
            reduced_counts = self.all_reduce(tensor.to(torch.int64), kind)
            if kind in ("min", "max"):
                return reduced_counts.bool()
            return reduced_counts
        if tensor.dtype in _NARROW:  # gloo cannot reduce these
            return self.all_reduce(tensor.to(torch.int64), kind).to(
                torch.float32 if kind == "mean" else tensor.dtype
            )
        self.collectives.note("all_reduce", tensor)
        buffer = self._on_backend(tensor).clone()
        reduce_op = dist.ReduceOp.SUM
        if kind == "min":
            reduce_op = dist.ReduceOp.MIN
        elif kind == "max":
            reduce_op = dist.ReduceOp.MAX
        dist.all_reduce(buffer, reduce_op, group=self.group)
        self.collectives.note_end()
        reduced = buffer / self.size if kind == "mean" else buffer
        return reduced.to(tensor.device).reshape(tensor.shape)

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.collectives.note("all_gather", tensor)
        raw_bytes = self._raw_bytes(tensor)
        gathered_bytes = raw_bytes.new_empty(self.size * raw_bytes.numel())
        _GATHER(gathered_bytes, raw_bytes, group=self.group)
        self.collectives.note_end()
        return _from_bytes(gathered_bytes, tensor.dtype, (self.size, *tensor.shape)).to(
            tensor.device
        )

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        self.collectives.note("broadcast", tensor)
        raw_bytes = self._raw_bytes(tensor).clone()
        dist.broadcast(raw_bytes, src=self._global_rank(src), group=self.group)
        self.collectives.note_end()
        return _from_bytes(raw_bytes, tensor.dtype, tensor.shape).to(tensor.device)

    def scatter(
        self, parts: Sequence[Tensor] | None, like: Tensor, src: int = 0
    ) -> Tensor:
        sender = self._global_rank(src)
        self.collectives.note("scatter", like)
        raw_bytes = torch.empty_like(self._raw_bytes(like))
        if self.rank == src and parts is not None:
            sent_bytes = list(map(self._raw_bytes, parts))
        else:
            sent_bytes = None
        dist.scatter(raw_bytes, sent_bytes, src=sender, group=self.group)
        self.collectives.note_end()
        return _from_bytes(raw_bytes, like.dtype, like.shape).to(like.device)

    def all_gather_object(
        self, python_object: Any
    ) -> list[Any]:  # Any: the caller's objects
        message, encoding_error = _message_of(python_object, self.codec)
        message_lengths = self.all_gather(torch.tensor(len(message))).tolist()
        padded_messages = self.all_gather(_padded_bytes(message, max(message_lengths)))
        if encoding_error is not None:
            raise encoding_error
        messages = (
            padded_message[:num_bytes].numpy().tobytes()
            for padded_message, num_bytes in zip(
                padded_messages, message_lengths, strict=True
            )
        )
        return [_object_of(message, self.codec) for message in messages]

    # Any: the caller's objects
    def broadcast_object(self, python_object: Any, src: int = 0) -> Any:
        message, encoding_error = (
            _message_of(python_object, self.codec) if self.rank == src else (b"", None)
        )
        num_bytes = int(self.broadcast(torch.tensor(len(message)), src))
        received_bytes = self.broadcast(_padded_bytes(message, num_bytes), src)
        if encoding_error is not None:
            raise encoding_error
        return _object_of(received_bytes.numpy().tobytes(), self.codec)

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
    ) -> None:
        self.collectives.note("exchange")
        if self._host_group is None:
            reads_host_tensors = "cpu" in self._device_types
            time_limit = timedelta(seconds=self._timeout_s)
            if reads_host_tensors:
                self._host_group = self.group
            else:
                self._host_group = dist.new_group(
                    list(self.ranks), backend="gloo", timeout=time_limit
                )
        starts_and_tensors = ((dist.isend, sends), (dist.irecv, receives))
        pending_works = []
        for start_transfer, tensors_by_position in starts_and_tensors:
            for position, tensor in tensors_by_position:
                pending_works.append(
                    start_transfer(
                        tensor, self._global_rank(position), group=self._host_group
                    )
                )
        for work in pending_works:
            if work is not None:
                work.wait()
        self.collectives.note_end()

    def barrier(self, label: str, timeout_s: float | None = None) -> None:
        self.collectives.note("barrier", group=self._name)
        self._roll_call.wait(label, timeout_s)
        self.collectives.note_end()

    def make_twin(self) -> ProcessGroupComm:
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

    def _global_rank(self, src: int) -> int:
        if not 0 <= src < self.size:
            raise CommError(
                f"src={src} is not a position in a group of {self.size}; use 0 to {self.size - 1}."
            )
        return self.ranks[src]

    def _on_backend(self, tensor: Tensor) -> Tensor:
        """Return a contiguous tensor on a device that the backend can read."""
        if tensor.device.type in self._device_types:
            device = tensor.device
        else:
            device = self._readable
        return tensor.detach().to(device).contiguous()

    def _raw_bytes(self, tensor: Tensor) -> Tensor:
        """Return the tensor's raw bytes, which every backend can move for every dtype."""
        readable_tensor = self._on_backend(tensor)
        if readable_tensor.is_complex():
            readable_tensor = torch.view_as_real(readable_tensor.resolve_conj())
        else:
            readable_tensor = readable_tensor.resolve_neg()
        flat_tensor = readable_tensor.reshape(-1)
        if (
            flat_tensor.stride(0) != 1
        ):  # one element of a column keeps the column's stride
            flat_tensor = torch.empty_like(
                flat_tensor, memory_format=torch.contiguous_format
            ).copy_(flat_tensor)
        return flat_tensor.view(torch.uint8)


def _from_bytes(raw_bytes: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if dtype.is_complex:
        real_dtype = torch.empty((), dtype=dtype).real.dtype
        return torch.view_as_complex(raw_bytes.view(real_dtype).reshape(*shape, 2))
    return raw_bytes.view(dtype).reshape(tuple(shape))


def _device_types(group: dist.ProcessGroup) -> frozenset[str]:
    """Return the device types whose tensors the group's backends accept, such as {"cpu", "cuda"}."""
    backend_config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    return frozenset(
        device_backend.partition(":")[0]
        for device_backend in str(backend_config).split(",")
        if ":" in device_backend
    )


def _group_tag(ranks: Sequence[int]) -> str:
    # hashes of int tuples are the same in every process
    return f"{len(ranks)}-{hash(tuple(ranks)) & 0xFFFFFFFF:x}"
