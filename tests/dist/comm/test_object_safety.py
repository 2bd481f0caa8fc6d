"""Objects between real ranks: sealed by the job's token, plain without one, and an error for everybody where one cannot travel."""

from __future__ import annotations

import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hasten.comm import ops
from hasten.comm.process_group import ProcessGroupComm
from hasten.comm.session import Credentials
from hasten.errors import CommError
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import Axis
from hasten.testing.pool import ranks

# Any in this file: objects of every type.


class Own:
    """A class that only pickle can send."""

    def __init__(self, x: int) -> None:
        self.x = x


class Evil:
    """Raises when it is unpickled, which stands for running anything."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('unpickled')",)


def with_credentials(ctx: ProcessContext, mine: Credentials) -> ProcessGroupComm:
    """The world once more, with other credentials."""
    world = ctx.world
    assert isinstance(world, ProcessGroupComm)
    return ProcessGroupComm(world.group, world.store, world.device, 60.0, mine)


@ranks(2, exhaustive=(3, 4))
def test_objects_of_every_size_and_kind_arrive(ctx: ProcessContext) -> None:
    comm = ctx.world
    assert comm.session().proven
    for size in (0, 1, 400, 470, 471, 472, 473, 504, 512, 5000, 3_000_000):
        everyone = comm.all_gather_object({"rank": comm.rank, "text": "x" * (size * comm.rank)})
        assert everyone == [{"rank": r, "text": "x" * (size * r)} for r in range(comm.size)]
        for src in range(comm.size):
            assert comm.broadcast_object(b"y" * size if comm.rank == src else None, src) == b"y" * size
    mixed = comm.all_gather_object(OrderedDict(a=Own(comm.rank)) if comm.rank % 2 else (comm.rank, torch.ones(2)))
    assert [type(one) for one in mixed] == [OrderedDict if r % 2 else tuple for r in range(comm.size)]
    assert ops.gather_object([comm.rank], comm) == list(range(comm.size))


@ranks(4, mesh={"tp": 2})
def test_groups_and_twins_have_sessions_of_their_own(ctx: ProcessContext) -> None:
    pair, twin = ctx.groups(Axis.TP), ctx.world.twin()
    assert pair.session().proven
    found: list[list[int]] = []
    thread = threading.Thread(
        target=lambda: found.append([twin.all_gather_object(ctx.rank * i)[-1] for i in range(20)])
    )
    thread.start()
    for _ in range(20):
        assert [one.x for one in pair.all_gather_object(Own(ctx.rank))] == list(pair.ranks)
    thread.join()
    assert found == [[3 * i for i in range(20)]]
    sealed = pair.session().seal(pair.session().pack("secret"), "1/0")
    with pytest.raises(CommError, match="not sealed by a member"):
        ctx.world.session().open(sealed, "1/0")


@ranks(2, exhaustive=(3,))
def test_an_object_that_cannot_be_sent_is_an_error_on_every_rank(ctx: ProcessContext) -> None:
    comm = ctx.world
    bad: Callable[[], Any] = threading.Lock
    for _ in range(2):
        with pytest.raises(CommError, match="a lock cannot be sent to other ranks: cannot pickle"):
            comm.all_gather_object(bad() if comm.rank == 1 else 1)
        with pytest.raises(CommError, match="a lock cannot be sent"):
            comm.broadcast_object(bad() if comm.rank == 0 else None)
        assert comm.all_gather_object(comm.rank) == list(range(comm.size))  # still in step


@ranks(2, 3)
def test_without_a_token_plain_objects_pass_and_pickles_are_refused_everywhere(ctx: ProcessContext) -> None:
    comm = with_credentials(ctx, Credentials(bytes([ctx.rank]) * 32))  # each machine with a home of its own
    assert comm.all_gather_object([comm.rank, torch.tensor(comm.rank)]) == [
        [r, torch.tensor(r)] for r in range(comm.size)
    ]
    with pytest.raises(CommError, match=r"Evil cannot be sent as plain data.*set HASTEN_TOKEN"):
        comm.all_gather_object(Evil() if comm.rank == 0 else None)
    assert comm.broadcast_object("on") == "on"
    loose = with_credentials(ctx, Credentials(pickle_unproven=True))
    assert loose.broadcast_object(Own(3)).x == 3


@ranks(2, 3)
def test_a_rank_without_the_token_cannot_make_another_unpickle(ctx: ProcessContext) -> None:
    hostile = ctx.rank == 1
    if not hostile:
        comm = with_credentials(ctx, Credentials(b"t" * 32, required=True))
        with pytest.raises(CommError, match=r"ranks \[1\] do not prove"):
            comm.all_gather_object(None)
        return
    stranger = with_credentials(ctx, Credentials())  # follows the protocol, knows everything but the token
    for proof in (bytes(32), b"p" * 32):
        stranger.all_gather(torch.frombuffer(bytearray(proof), dtype=torch.uint8))


@ranks(2)
def test_a_frame_forged_after_the_proof_is_not_unpickled(ctx: ProcessContext) -> None:
    comm = with_credentials(ctx, Credentials(b"t" * 32, required=True))
    assert comm.all_gather_object(comm.rank) == [0, 1]
    if comm.rank == 0:
        with pytest.raises(CommError, match="not sealed by a member"):
            comm.all_gather_object(None)
        return
    evil = bytes(32) + b"p" + pickle.dumps(Evil())  # somebody took over the connection of rank 1
    frame = (len(evil).to_bytes(8, "little") + evil).ljust(512, b"\0")
    comm.all_gather(torch.frombuffer(bytearray(frame), dtype=torch.uint8))
