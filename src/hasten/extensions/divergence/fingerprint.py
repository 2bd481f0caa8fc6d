"""Fingerprints of tensors: a 64-bit hash of each tensor's bits, computed on its device without a sync.

The bits are read as integers of at most 32 bits, multiplied by fixed odd 64-bit numbers and summed modulo 2**64. One changed element always
changes the result; several changes cancel with a probability of about 2**-32. Floating-point rules do not apply: NaN has bits like any other
number, and the order of additions does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.distributed import Store

from hasten.extensions.divergence.divergence import Record
from hasten.runtime.mesh_plan import Axis, MeshSpec

CHUNK: Final = 1 << 20
"""Elements that are multiplied at once, since the products are 64-bit integers."""
_INTEGERS: Final = MappingProxyType(
    {8: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
)


class Fingerprints:
    """Computes fingerprints, with the same multipliers on every rank."""

    def __init__(self) -> None:
        random_bytes = np.random.Generator(np.random.PCG64(0)).bytes(8 * CHUNK)
        odd_numbers = np.frombuffer(random_bytes, dtype=np.int64) | 1
        self._multipliers = {torch.device("cpu"): torch.from_numpy(odd_numbers)}

    @torch.no_grad()
    def compute_all(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the fingerprint of each tensor, as int64 on `device`. Tensors may be on different devices."""
        fingerprints = [torch.zeros(0, dtype=torch.int64, device=device)]
        for tensor in tensors:
            fingerprint = self._hash_integers(_view_as_integers(tensor))
            fingerprints.append(fingerprint.to(device, non_blocking=True).reshape(1))
        return torch.cat(fingerprints)

    def _hash_integers(self, integers: Tensor) -> Tensor:
        device = integers.device
        if device not in self._multipliers:
            cpu_multipliers = self._multipliers[torch.device("cpu")]
            self._multipliers[device] = cpu_multipliers.to(device)
        multipliers = self._multipliers[device]
        fingerprint = torch.zeros((), dtype=torch.int64, device=device)
        for chunk_number, chunk in enumerate(torch.split(integers, CHUNK)):
            chunk_sum = (chunk * multipliers[: chunk.numel()]).sum()
            mixed_sum = chunk_sum ^ (chunk_sum >> 32)
            fingerprint += mixed_sum * multipliers[chunk_number]
        return fingerprint


def _view_as_integers(tensor: Tensor) -> Tensor:
    """Return the tensor's bits as a flat tensor of integers."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat_tensor = tensor.resolve_neg().reshape(-1)
    return flat_tensor.view(_INTEGERS[flat_tensor.element_size()])


_AXES: Final = (Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP, Axis.TP)
"""Axes along which values can be equal; pipeline stages hold different layers."""
_NUM_AXES_CLASSES: Final = 1 << len(_AXES)
_MASK: Final = (1 << 64) - 1
_KEPT_CHECKS: Final = 16
"""Number of recent checks whose messages stay in the store; each overwrites the one that is this many checks older."""
_AGREED: Final = "agreed"


class FingerprintStore:
    """Exchange of fingerprints through the job's store. Checks are numbered identically on every rank."""

    def __init__(self, store: Store, rank: int, mesh: MeshSpec) -> None:
        store_number = store.add(
            f"hasten/sentinel/made/{rank}", 1
        )  # every rank creates its Accelerators in the same order
        self._prefix = f"hasten/sentinel/{store_number}"
        self._store = store
        self._rank = rank
        self._size = mesh.world_size
        self._first_peer = _find_first_peers(mesh) if rank == 0 else None
        self._decided: dict[int, bool] = {}

    def post_sums(self, number: int, records: Sequence[Record]) -> None:
        """Post this rank's values as one sum per set of axes. The order of the records does not matter."""
        sums = [0] * _NUM_AXES_CLASSES
        for record in records:
            axes_class = _axes_class_of(record.axes)
            sums[axes_class] = (sums[axes_class] + record.value) & _MASK
        self._set_message(
            number, self._rank, np.array(sums, dtype=np.uint64).tobytes().hex()
        )

    def read_verdict(self, number: int) -> bool | None:
        """Return whether all ranks that must agree have posted the same; None until rank 0 has all posts."""
        if self._first_peer is None:
            messages = self._peek_messages(number, ["verdict"])
            return None if messages is None else messages[0] == _AGREED
        if number not in self._decided:
            posts = self._peek_messages(number, range(self._size))
            if posts is None:
                return None
            posted_sums = np.stack(
                [np.frombuffer(bytes.fromhex(post), dtype=np.uint64) for post in posts]
            )
            is_equal = bool(
                (
                    posted_sums
                    == np.take_along_axis(posted_sums, self._first_peer, axis=0)
                ).all()
            )
            if self._size > 1:
                self._set_message(number, "verdict", _AGREED if is_equal else "differ")
            self._decided[number] = is_equal
            self._decided.pop(number - _KEPT_CHECKS, None)
        return self._decided[number]

    def post_records(self, number: int, records: Sequence[Record]) -> None:
        """Post the full records of this rank."""
        self._set_message(
            number, f"held/{self._rank}", msgspec.json.encode(records).decode()
        )

    def read_records(self, number: int) -> dict[int, list[Record]] | None:
        """Return the full records of every rank; None until all have posted."""
        posts = self._peek_messages(
            number, [f"held/{rank}" for rank in range(self._size)]
        )
        if posts is None:
            return None
        return {
            rank: msgspec.json.decode(post, type=list[Record])
            for rank, post in enumerate(posts)
        }

    def set_answer(self, number: int, answer: str) -> None:
        """Post rank 0's diagnosis for every rank."""
        self._set_message(number, "answer", answer)

    def read_answer(self, number: int) -> str | None:
        """Return rank 0's diagnosis; None until it is posted."""
        messages = self._peek_messages(number, ["answer"])
        return None if messages is None else messages[0]

    def _message_key(self, number: int, message_name: int | str) -> str:
        return f"{self._prefix}/{number % _KEPT_CHECKS}/{message_name}"

    def _set_message(self, number: int, message_name: int | str, text: str) -> None:
        self._store.set(self._message_key(number, message_name), f"{number}:{text}")

    def _peek_messages(
        self, number: int, message_names: Iterable[int | str]
    ) -> list[str] | None:
        """Return the given messages of a check, or None while one is missing; never waits."""
        keys = [
            self._message_key(number, message_name) for message_name in message_names
        ]
        if not self._store.check(keys):
            return None
        notes = [value.decode().partition(":") for value in self._store.multi_get(keys)]
        if all(check_number == str(number) for check_number, _, _ in notes):
            return [text for _, _, text in notes]
        return None


# called for every tensor in every check, with few different sets of axes
@lru_cache(maxsize=64)
def _axes_class_of(axes: tuple[str, ...]) -> int:
    return sum(1 << position for position, axis in enumerate(_AXES) if axis in axes)


def _find_first_peers(
    mesh: MeshSpec,
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return, for each rank and set of axes, the first of the ranks that must hold the same values."""
    first_peers = np.zeros((mesh.world_size, _NUM_AXES_CLASSES), dtype=np.int64)
    for axes_class in range(_NUM_AXES_CLASSES):
        axes = [
            axis for position, axis in enumerate(_AXES) if axes_class >> position & 1
        ]
        for group in mesh.groups(*axes):
            first_peers[list(group), axes_class] = group[0]
    return first_peers
