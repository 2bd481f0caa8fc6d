"""Messages that waiting ranks exchange through the job's store, over a separate connection."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from torch.distributed import Store

from hasten.extensions.watch.state import Note, State


class StallStore:
    """Messages of ranks in the store, over a cloned connection, since the training thread's may be blocked."""

    def __init__(self, store: Store, rank: int) -> None:
        # every rank creates its Accelerators in the same order
        number = store.add(f"hasten/stall/made/{rank}", 1)
        self._prefix = f"hasten/stall/{number}"
        self._store = store
        self._cloned_store: Store | None = None
        self._rank = rank
        self._turn = 0

    def post_note(self, rank_note: Note) -> None:
        """Post this rank's host and process. Called by the training thread at the start."""
        self._store.set(f"{self._prefix}/note/{self._rank}", _encode_message(rank_note))

    def post_end(self, rank_note: Note) -> None:
        """Post the end of this rank. Called at exit, when the training thread's connection is no longer blocked.

        No connection is opened for it: if the store's server has exited, torch would retry for the whole init timeout.
        """
        (self._cloned_store or self._store).set(
            f"{self._prefix}/note/{self._rank}", _encode_message(rank_note)
        )

    def post_state(self, rank_state: State) -> None:
        """Post the state of this rank."""
        self._turn += 1
        text = _encode_message(msgspec.structs.replace(rank_state, turn=self._turn))
        self._own_connection().set(f"{self._prefix}/state/{self._rank}", text)

    def read_notes(self, rank_numbers: Sequence[int]) -> dict[int, Note]:
        """Return the hosts, processes and ends of ranks."""
        return {
            rank: msgspec.json.decode(data, type=Note)
            for rank, data in self._read_topic("note", rank_numbers).items()
        }

    def read_states(self, rank_numbers: Sequence[int]) -> dict[int, State]:
        """Return the posted states of ranks."""
        return {
            rank: msgspec.json.decode(data, type=State)
            for rank, data in self._read_topic("state", rank_numbers).items()
        }

    def post_heartbeat(self, turn: int) -> None:
        """Post that this rank writes the report, with a growing heartbeat counter."""
        self._own_connection().set(f"{self._prefix}/speaker", f"{self._rank} {turn}")

    def read_reporter(self) -> str:
        """Return the reporting rank and its heartbeat counter; empty if there is none."""
        return self._get_value("speaker")

    def stop_reporting(self) -> None:
        """Stop being the reporting rank."""
        self._own_connection().delete_key(f"{self._prefix}/speaker")

    def set_verdict(self, reason: str) -> None:
        """Post to every rank that the job ends, with the reason."""
        self._own_connection().set(f"{self._prefix}/verdict", reason)

    def read_verdict(self) -> str:
        """Return the reason why the job ends; empty if it does not."""
        return self._get_value("verdict")

    def _get_value(self, key: str) -> str:
        store = self._own_connection()
        if store.check([f"{self._prefix}/{key}"]):
            return store.get(f"{self._prefix}/{key}").decode()
        return ""

    def _read_topic(self, topic: str, rank_numbers: Sequence[int]) -> dict[int, bytes]:
        store = self._own_connection()
        keys = {rank: f"{self._prefix}/{topic}/{rank}" for rank in rank_numbers}
        return {
            rank: store.get(key) for rank, key in keys.items() if store.check([key])
        }

    def _own_connection(self) -> Store:
        if self._cloned_store is None:
            self._cloned_store = self._store.clone()  # type: ignore[attr-defined]  # missing in torch's stub
        return self._cloned_store


def _encode_message(value: Note | State) -> str:
    return msgspec.json.encode(value).decode()
