"""How ranks compare what they hold over the job's store: everybody posts, rank 0 tells all whether they agree, nobody waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

import msgspec
import numpy as np
from torch.distributed import Store

from hasten.runtime.axes import Axis, MeshSpec
from hasten.trust.divergence.divergence import Record

_AXES: Final = (Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP, Axis.TP)
"""Axes along which something can be equal; pipeline stages hold different layers."""
_CLASSES: Final = 1 << len(_AXES)
_MASK: Final = (1 << 64) - 1
_KEPT: Final = 16
"""Checks whose notes are in the store: the newest ones, each in the place of the one that is so many checks older."""
_AGREED: Final = "agreed"


class Ballot:
    """The votes of one run. A vote has a number, and the same number means the same check on every rank."""

    def __init__(self, store: Store, rank: int, mesh: MeshSpec) -> None:
        made = store.add(f"hasten/sentinel/made/{rank}", 1)  # Accelerators are made in the same order on every rank
        self._prefix = f"hasten/sentinel/{made}"
        self._store = store
        self._rank = rank
        self._size = mesh.world_size
        self._first_peer = _first_peers(mesh) if rank == 0 else None
        self._decided: dict[int, bool] = {}

    def post(self, number: int, records: Sequence[Record]) -> None:
        """Say what this rank holds, in one number for each set of axes. The order of the records does not matter."""
        sums = [0] * _CLASSES
        for record in records:
            which = _class_of(record.axes)
            sums[which] = (sums[which] + record.value) & _MASK
        self._note(number, self._rank, np.array(sums, dtype=np.uint64).tobytes().hex())

    def verdict(self, number: int) -> bool | None:
        """Whether all ranks that must agree have posted the same; None while rank 0 does not know."""
        if self._first_peer is None:
            found = self._peek(number, ["verdict"])
            return None if found is None else found[0] == _AGREED
        if number not in self._decided:
            posts = self._peek(number, range(self._size))
            if posts is None:
                return None
            held = np.stack([np.frombuffer(bytes.fromhex(post), dtype=np.uint64) for post in posts])
            same = bool((held == np.take_along_axis(held, self._first_peer, axis=0)).all())
            if self._size > 1:
                self._note(number, "verdict", _AGREED if same else "differ")
            self._decided[number] = same
            self._decided.pop(number - _KEPT, None)
        return self._decided[number]

    def show(self, number: int, records: Sequence[Record]) -> None:
        """Say in full what this rank holds."""
        self._note(number, f"held/{self._rank}", msgspec.json.encode(records).decode())

    def shown(self, number: int) -> dict[int, list[Record]] | None:
        """What every rank has said in full; None while some have not."""
        posts = self._peek(number, [f"held/{rank}" for rank in range(self._size)])
        if posts is None:
            return None
        return {rank: msgspec.json.decode(post, type=list[Record]) for rank, post in enumerate(posts)}

    def set_answer(self, number: int, answer: str) -> None:
        """Tell every rank what rank 0 has found."""
        self._note(number, "answer", answer)

    def answer(self, number: int) -> str | None:
        """What rank 0 has found; None while it has not."""
        found = self._peek(number, ["answer"])
        return None if found is None else found[0]

    def _key(self, number: int, what: int | str) -> str:
        return f"{self._prefix}/{number % _KEPT}/{what}"

    def _note(self, number: int, what: int | str, text: str) -> None:
        self._store.set(self._key(number, what), f"{number}:{text}")

    def _peek(self, number: int, what: Iterable[int | str]) -> list[str] | None:
        """All these notes of a check, or None while one is missing; never waits."""
        keys = [self._key(number, one) for one in what]
        if not self._store.check(keys):
            return None
        notes = [value.decode().partition(":") for value in self._store.multi_get(keys)]
        return [text for _, _, text in notes] if all(found == str(number) for found, _, _ in notes) else None


@lru_cache(maxsize=64)  # asked for every tensor in every check, and the same few sets of axes come again
def _class_of(axes: tuple[str, ...]) -> int:
    return sum(1 << position for position, axis in enumerate(_AXES) if axis in axes)


def _first_peers(mesh: MeshSpec) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """For each rank and set of axes, the first of the ranks that must hold the same."""
    first = np.zeros((mesh.world_size, _CLASSES), dtype=np.int64)
    for which in range(_CLASSES):
        axes = [axis for position, axis in enumerate(_AXES) if which >> position & 1]
        for group in mesh.groups(*axes):
            first[list(group), which] = group[0]
    return first
