"""Objects between real ranks: plain data arrives, nothing is unpickled, and an object that cannot be sent is an error for everybody."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch

from hasten.comm import ops
from hasten.errors import CommError
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import Axis
from hasten.testing.pool import ranks

# Any in this file: objects of every type.


class Own:
    """A class that only pickle could send."""

    def __init__(self, x: int) -> None:
        self.x = x


class Evil:
    """Raises when it is unpickled, which stands for running anything."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('unpickled')",)


@ranks(2, exhaustive=(3, 4))
def test_objects_of_every_size_and_kind_arrive(ctx: ProcessContext) -> None:
    comm = ctx.world
    for size in (0, 1, 400, 470, 471, 472, 473, 504, 512, 5000, 3_000_000):
        everyone = comm.all_gather_object(
            {"rank": comm.rank, "text": "x" * (size * comm.rank)}
        )
        assert everyone == [
            {"rank": r, "text": "x" * (size * r)} for r in range(comm.size)
        ]
        for src in range(comm.size):
            assert (
                comm.broadcast_object(b"y" * size if comm.rank == src else None, src)
                == b"y" * size
            )
    mixed = comm.all_gather_object(
        {comm.rank} if comm.rank % 2 else (comm.rank, torch.ones(2))
    )
    assert [type(gathered_object) for gathered_object in mixed] == [
        set if r % 2 else tuple for r in range(comm.size)
    ]
    assert ops.gather_object([comm.rank], comm) == list(range(comm.size))


@ranks(4, mesh={"tp": 2})
def test_groups_and_twins_exchange_objects_at_the_same_time(
    ctx: ProcessContext,
) -> None:
    pair, twin = ctx.groups(Axis.TP), ctx.world.make_twin()
    gathered_lists: list[list[int]] = []
    thread = threading.Thread(
        target=lambda: gathered_lists.append(
            [twin.all_gather_object(ctx.rank * i)[-1] for i in range(20)]
        )
    )
    thread.start()
    for _ in range(20):
        assert pair.all_gather_object(ctx.rank) == list(pair.ranks)
    thread.join()
    assert gathered_lists == [[3 * i for i in range(20)]]


@ranks(2, exhaustive=(3,))
def test_an_object_that_cannot_be_sent_is_an_error_on_every_rank(
    ctx: ProcessContext,
) -> None:
    comm = ctx.world
    for _ in range(2):
        with pytest.raises(
            CommError,
            match=r"Own cannot be sent to other ranks.*Send what it is made of",
        ):
            comm.all_gather_object(Own(1) if comm.rank == 1 else 1)
        with pytest.raises(CommError, match="Own cannot be sent"):
            comm.broadcast_object(Own(1) if comm.rank == 0 else None)
        # still in step
        assert comm.all_gather_object(comm.rank) == list(range(comm.size))


@ranks(2)
def test_a_pickle_from_another_rank_is_not_loaded(ctx: ProcessContext) -> None:
    comm = ctx.world
    if comm.rank == 0:
        with pytest.raises(CommError, match="cannot be decoded"):
            comm.all_gather_object(None)
        return
    evil = b"o" + pickle.dumps(Evil())  # somebody took over the connection of rank 1
    (length, _) = comm.all_gather(torch.tensor(len(evil))).tolist()
    comm.all_gather(
        torch.frombuffer(bytearray(evil.ljust(length, b"\0")), dtype=torch.uint8)
    )
