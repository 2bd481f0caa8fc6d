"""Sessions: members prove the token, and no message of anybody else is decoded."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hasten.comm.session import Credentials, PackedObject, Session, agree
from hasten.errors import CommError

TOKEN = b"t" * 32
Change = Callable[[int, int, bytes], bytes]


class Room:
    """An exchange of bytes between threads; `change(round, sender, data)` is what a stranger does on the way."""

    def __init__(self, size: int, change: Change = lambda turn, sender, data: data) -> None:
        self.seen: list[bytes] = []
        self._size = size
        self._barrier = threading.Barrier(size)
        self._slots: list[list[bytes]] = [[b""] * size for _ in range(8)]
        self._change = change

    def exchange(self, rank: int) -> Callable[[bytes], Sequence[bytes]]:
        turn = -1

        def give(data: bytes) -> Sequence[bytes]:
            nonlocal turn
            turn += 1
            self.seen.append(data)
            self._slots[turn][rank] = data
            self._barrier.wait(10)
            return [d if i == rank else self._change(turn, i, d) for i, d in enumerate(self._slots[turn])]

        return give


def meet(*members: Credentials, change: Change | None = None) -> tuple[list[Session | CommError], Room]:
    room = Room(len(members), change) if change else Room(len(members))
    out: list[Any] = [None] * len(members)  # Any: a session or the error

    def one(rank: int) -> None:
        try:
            out[rank] = agree(room.exchange(rank), range(10, 10 + len(members)), rank, members[rank])
        except CommError as error:
            out[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out, room


def sessions(found: list[Session | CommError]) -> list[Session]:
    assert all(isinstance(one, Session) for one in found), found
    return [one for one in found if isinstance(one, Session)]


class Evil:
    """Raises when it is unpickled, which stands for running anything."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('unpickled')",)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_members_with_the_same_token_agree_and_never_send_it(size: int) -> None:
    found, room = meet(*[Credentials(TOKEN, required=True)] * size)
    group = sessions(found)
    assert all(one.proven for one in group)
    assert not any(TOKEN[:8] in data for data in room.seen)
    sent = group[0].seal(group[0].pack({"a": Evil}), "1/0")
    assert group[-1].open(sent, "1/0") == {"a": Evil}


def test_a_member_with_another_token_or_none_is_an_error_for_all() -> None:
    good = Credentials(TOKEN, required=True)
    for bad in (Credentials(b"x" * 32, required=True), Credentials(), Credentials(b"y" * 32)):
        found, _ = meet(good, bad, good)
        assert all(isinstance(one, CommError) for one in found)
        assert "HASTEN_TOKEN" in str(found[0])
        assert "ranks [11]" in str(found[0])


def test_proofs_that_are_changed_or_repeated_prove_nothing() -> None:
    kept: dict[int, bytes] = {}

    def repeat(turn: int, sender: int, data: bytes) -> bytes:
        return kept.get(turn, data) if sender == 1 else data

    _, room = meet(*[Credentials(TOKEN)] * 2)
    kept.update({0: room.seen[0], 1: room.seen[-1]})
    found, _ = meet(Credentials(TOKEN, required=True), Credentials(TOKEN, required=True), change=repeat)
    assert isinstance(found[0], CommError)


def test_without_a_shared_token_plain_data_passes_and_pickles_do_not() -> None:
    for members in ([Credentials(), Credentials()], [Credentials(b"a" * 32), Credentials(b"b" * 32)]):
        group = sessions(meet(*members)[0])
        assert not any(one.proven for one in group)
        assert group[1].open(group[0].seal(group[0].pack([1, "x"]), "1/0"), "1/0") == [1, "x"]
        with pytest.raises(CommError, match="HASTEN_TOKEN"):
            group[0].pack(Evil())
        forged = bytes(32) + b"p" + pickle.dumps(Evil())
        with pytest.raises(CommError, match="does not read"):
            group[1].open(forged, "1/0")
    loose = sessions(meet(*[Credentials(pickle_unproven=True)] * 2)[0])
    with pytest.raises(SystemExit):
        loose[1].open(loose[0].seal(loose[0].pack(Evil()), "1/0"), "1/0")


def test_every_changed_byte_and_every_other_label_is_refused_before_decoding() -> None:
    one, two = sessions(meet(*[Credentials(TOKEN)] * 2)[0])
    other = sessions(meet(*[Credentials(TOKEN)] * 2)[0])[0]
    sent = one.seal(PackedObject(b"p", pickle.dumps(Evil())), "1/0")
    for position in range(len(sent)):
        changed = bytearray(sent)
        changed[position] ^= 1
        with pytest.raises(CommError, match="not sealed by a member"):
            two.open(bytes(changed), "1/0")
    for stranger, label in ((two, "2/0"), (two, "1/1"), (other, "1/0")):  # later, as another member, in another session
        with pytest.raises(CommError, match="not sealed by a member"):
            stranger.open(sent, label)
    with pytest.raises(SystemExit):
        two.open(sent, "1/0")


def test_the_token_is_not_shown() -> None:
    assert "ttt" not in repr(Credentials(TOKEN))
