"""The notes that ranks leave for each other in the job's store while they wait, over a connection of their own."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from torch.distributed import Store

from hasten.trust.divergence.state import Note, State


class Bulletin:
    """The training thread's connection may be blocked in a wait, so this one is a clone, made at first use."""

    def __init__(self, store: Store, rank: int) -> None:
        number = store.add(f"hasten/stall/made/{rank}", 1)  # Accelerators are made in the same order on every rank
        self._prefix = f"hasten/stall/{number}"
        self._store = store
        self._own: Store | None = None
        self._rank = rank
        self._posted = False
        self._turn = 0

    def introduce(self, note: Note) -> None:
        """Say where this rank runs. Called by the training thread, at the start."""
        self._store.set(f"{self._prefix}/note/{self._rank}", _text(note))

    def leave(self, note: Note) -> None:
        """Say how this rank ended. Called at exit, when nobody waits in the training thread's connection any more.

        No connection is made for it: with whoever serves the store gone, torch would try again for as long as ranks may take to meet.
        """
        (self._own or self._store).set(f"{self._prefix}/note/{self._rank}", _text(note))

    def post(self, state: State) -> None:
        """Say what this rank is doing."""
        self._posted = True
        self._turn += 1
        text = _text(msgspec.structs.replace(state, turn=self._turn))
        self._connected().set(f"{self._prefix}/state/{self._rank}", text)

    def withdraw(self) -> None:
        """Take back what was posted: this rank goes on."""
        if self._posted:
            self._posted = False
            self._connected().delete_key(f"{self._prefix}/state/{self._rank}")

    def notes(self, ranks: Sequence[int]) -> dict[int, Note]:
        """Return where ranks run and how they ended."""
        return {rank: msgspec.json.decode(data, type=Note) for rank, data in self._read("note", ranks).items()}

    def states(self, ranks: Sequence[int]) -> dict[int, State]:
        """What ranks have posted."""
        return {rank: msgspec.json.decode(data, type=State) for rank, data in self._read("state", ranks).items()}

    def speak(self, turn: int) -> None:
        """Say that this rank is the one that speaks, and still there."""
        self._connected().set(f"{self._prefix}/speaker", f"{self._rank} {turn}")

    def speaker(self) -> str:
        """Who speaks, with a number that grows while it is there; empty if nobody does."""
        return self._get("speaker")

    def be_silent(self) -> None:
        """Stop speaking."""
        self._connected().delete_key(f"{self._prefix}/speaker")

    def set_verdict(self, words: str) -> None:
        """Tell every rank that the job ends, and why."""
        self._connected().set(f"{self._prefix}/verdict", words)

    def verdict(self) -> str:
        """Return why the job ends; empty while it does not."""
        return self._get("verdict")

    def _get(self, key: str) -> str:
        store = self._connected()
        return store.get(f"{self._prefix}/{key}").decode() if store.check([f"{self._prefix}/{key}"]) else ""

    def _read(self, what: str, ranks: Sequence[int]) -> dict[int, bytes]:
        store = self._connected()
        keys = {rank: f"{self._prefix}/{what}/{rank}" for rank in ranks}
        return {rank: store.get(key) for rank, key in keys.items() if store.check([key])}

    def _connected(self) -> Store:
        if self._own is None:
            self._own = self._store.clone()  # type: ignore[attr-defined]  # missing in torch's stub
        return self._own


def _text(value: Note | State) -> str:
    return msgspec.json.encode(value).decode()
