"""Tree collectives on real gloo ranks: right for every dtype and shape, and an error for everybody when ranks differ."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hasten import Accelerator
from hasten.comm import ops
from hasten.comm.agreement import Flag, agree
from hasten.errors import CommError, MismatchError, MissingRanksError, PeerFailedError
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import BATCH, Axis
from hasten.testing.pool import ranks

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def value_of(rank: int, dtype: torch.dtype) -> Tensor:
    base = torch.arange(6).reshape(2, 3) + rank
    return (base % 2 == 0) if dtype == torch.bool else base.to(dtype)


@ranks(1, 2, exhaustive=(3, 4))
def test_gather_joins_rows_of_every_dtype(ctx: ProcessContext) -> None:
    comm = ctx.world
    for dtype in DTYPES:
        rank_tensor = value_of(comm.rank, dtype).t()  # not contiguous
        tree: dict[str, Any] = {
            "x": rank_tensor,
            "s": rank_tensor.sum() if dtype != torch.bool else rank_tensor[0, 0],
            "k": [None, "text", 7],
        }
        out = ops.gather(tree, comm)
        expected = torch.cat([value_of(r, dtype).t() for r in range(comm.size)])
        assert out["x"].dtype == dtype
        assert torch.equal(out["x"], expected)
        assert out["s"].shape == (comm.size,)
        assert out["k"] == [None, "text", 7]
        for single_tensor, gathered in (
            (rank_tensor, out["x"]),
            (tree["s"], out["s"]),
            (rank_tensor[:0], out["x"][:0]),
            (rank_tensor[0], None),
        ):
            joined = ops.gather(single_tensor, comm)
            gathered = (
                torch.cat([value_of(r, dtype).t()[0] for r in range(comm.size)])
                if gathered is None
                else gathered
            )
            assert joined.dtype == single_tensor.dtype
            assert torch.equal(joined, gathered), (dtype, single_tensor.shape)


@ranks(2, exhaustive=(3,))
def test_one_tensor_that_differs_is_refused_everywhere(ctx: ProcessContext) -> None:
    """A small tensor takes a shorter way than a tree; ranks on different ways still meet, and name what differs."""
    comm = ctx.world
    candidates: tuple[Any, ...] = (
        torch.ones(2),
        torch.ones(3),
        torch.ones(2).double(),
        {"x": torch.ones(2)},
        torch.ones(900),
    )
    for different in candidates[1:]:
        with pytest.raises(
            MismatchError, match=r"rank 0: gather of tensor: \[2\] float32"
        ):
            ops.gather(candidates[0] if comm.rank == 0 else different, comm)
        assert torch.equal(
            ops.gather(torch.tensor(comm.rank), comm), torch.arange(comm.size)
        )


@ranks(2, exhaustive=(1, 4))
def test_reduce_every_kind(ctx: ProcessContext) -> None:
    comm = ctx.world
    for dtype in DTYPES:
        stacked = torch.stack([value_of(r, dtype) for r in range(comm.size)])
        rank_values = value_of(comm.rank, dtype)
        total = (
            stacked.long().sum(0) if dtype == torch.bool else stacked.sum(0).to(dtype)
        )
        assert torch.equal(ops.reduce(rank_values, comm, "sum"), total)
        mean = ops.reduce(rank_values, comm, "mean", scale=2.0)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        torch.testing.assert_close(
            mean.to(wide), stacked.to(wide).mean(0) * 2, rtol=1e-2, atol=1e-2
        )
        if dtype.is_complex:
            with pytest.raises(CommError, match="complex"):
                ops.reduce(rank_values, comm, "max")
        else:
            assert torch.equal(ops.reduce(rank_values, comm, "max"), stacked.amax(0))
            assert torch.equal(ops.reduce(rank_values, comm, "min"), stacked.amin(0))


@ranks(2, exhaustive=(1, 3, 4))
def test_ragged_gather_takes_any_number_of_rows(ctx: ProcessContext) -> None:
    comm = ctx.world
    for sizes in ([0, 1, 2, 3], [3, 0, 0, 5], [0, 0, 0, 0], [2, 2, 2, 2]):
        rows = sizes[comm.rank]
        # more than fit the first header
        tree = {f"t{i}": torch.full((rows, i + 1), comm.rank) for i in range(20)}
        out = ops.gather_ragged(tree, comm)
        expected = [r for r in range(comm.size) for _ in range(sizes[r])]
        for i in range(20):
            assert out[f"t{i}"].shape == (len(expected), i + 1)
            assert out[f"t{i}"][:, 0].tolist() == expected


@ranks(2, 4)
def test_broadcast_and_objects(ctx: ProcessContext) -> None:
    comm = ctx.world
    for src in range(comm.size):
        broadcast = ops.broadcast(
            {
                "x": value_of(comm.rank, torch.bfloat16),
                "b": value_of(comm.rank, torch.bool),
            },
            comm,
            src,
        )
        assert torch.equal(broadcast["x"], value_of(src, torch.bfloat16))
        assert torch.equal(broadcast["b"], value_of(src, torch.bool))
        assert ops.broadcast_object_list([comm.rank, "x"], comm, src) == [src, "x"]
    assert ops.gather_object([comm.rank] * 2, comm) == [
        r for r in range(comm.size) for _ in range(2)
    ]
    assert ops.gather_object({"r": comm.rank}, comm) == [
        {"r": r} for r in range(comm.size)
    ]
    with pytest.raises(CommError, match="not a position"):
        comm.broadcast(torch.ones(1), src=comm.size)


@ranks(1, 2, exhaustive=(3,))
def test_pad_across_any_dim(ctx: ProcessContext) -> None:
    comm = ctx.world
    for dim in (0, 1, -1):
        for first in (False, True):
            shape = [2, 2]
            shape[dim] = comm.rank + 1
            out = ops.pad_across(
                torch.ones(shape), comm, dim=dim, pad_index=-1, pad_first=first
            )
            assert out.shape[dim] == comm.size
            missing = comm.size - comm.rank - 1
            where = out.narrow(dim, 0 if first else comm.rank + 1, missing)
            assert bool((where == -1).all())
            assert int((out == 1).sum()) == 2 * (comm.rank + 1)


@ranks(2, exhaustive=(4,))
def test_a_difference_is_an_error_on_every_rank_with_a_table(
    ctx: ProcessContext,
) -> None:
    comm = ctx.world
    with pytest.raises(
        MismatchError, match=r"rank 1: gather of x: \[3\] float32"
    ) as caught:
        ops.gather({"x": torch.ones(2 + comm.rank)}, comm)
    assert "rank 0: gather of x: [2] float32" in str(caught.value)
    with pytest.raises(MismatchError, match="int64"):
        ops.reduce(
            torch.ones(2, dtype=torch.int64 if comm.rank else torch.float32), comm
        )
    with pytest.raises(MismatchError, match="reduce sum"):
        ops.gather(torch.ones(2), comm) if comm.rank else ops.reduce(
            torch.ones(2), comm
        )
    with pytest.raises(MismatchError, match=r"\[2, 5\]"):
        ops.gather_ragged(torch.ones(2, 4 + comm.rank), comm)
    # and the group still works
    assert ops.gather(torch.ones(1), comm).shape == (comm.size,)


@ranks(2, exhaustive=(3, 4))
def test_gathering_is_right_for_tensors_of_any_size(
    ctx: ProcessContext,
) -> None:
    """Trees of one to twenty tensors of all sizes, equal and ragged, empty ones included."""
    comm = ctx.world
    shared = torch.Generator().manual_seed(0)  # shapes are drawn alike on every rank

    def draw(max_size: int) -> int:
        return int(torch.randint(max_size, (1,), generator=shared))

    def filled(rows: int, width: int, dtype: torch.dtype, rank: int) -> Tensor:
        values = torch.arange(rows * width).reshape(rows, width) + 100 * rank
        return (values % 3 == 0) if dtype == torch.bool else values.to(dtype)

    for turn in range(60):
        count, max_size = 1 + draw(20 if turn % 10 == 0 else 4), (4, 12, 60)[turn % 3]
        shapes = [
            (draw(max_size), draw(max_size), DTYPES[draw(len(DTYPES))])
            for _ in range(count)
        ]
        extra = [draw(3) for _ in range(comm.size)]  # further rows on each rank

        def tree_of(
            rank: int,
            extra_rows: int,
            shapes: list[tuple[int, int, torch.dtype]] = shapes,
        ) -> list[Tensor]:
            return [
                filled(rows + extra_rows, width, dtype, rank)
                for rows, width, dtype in shapes
            ]

        for uneven in (False, True):
            members = [
                tree_of(rank, extra[rank] if uneven else 0) for rank in range(comm.size)
            ]
            gathered = (ops.gather_ragged if uneven else ops.gather)(
                members[comm.rank], comm
            )
            for gathered_tensor, *rank_tensors in zip(gathered, *members, strict=True):
                assert gathered_tensor.dtype == rank_tensors[0].dtype
                assert torch.equal(gathered_tensor, torch.cat(rank_tensors))


@ranks(2, exhaustive=(3, 4))
def test_a_shape_that_changes_on_one_rank_is_refused_at_once_whatever_came_before(
    ctx: ProcessContext,
) -> None:
    """Random sequences of calls, in which one rank now and then does something else: an error on all ranks, and it goes on."""
    comm = ctx.world
    shared = torch.Generator().manual_seed(1)  # drawn alike on every rank

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=shared))

    sizes = (1, 100, 3000, 16384, 60000)
    ways: tuple[Callable[[Tensor], Any], ...] = (
        lambda x: ops.gather(x, comm),
        lambda x: ops.gather({"x": x}, comm)["x"],
        lambda x: ops.gather_ragged(x[: len(x) - comm.rank], comm),
        lambda x: ops.reduce(x, comm),
        lambda x: ops.pad_across(x, comm),
    )
    previous = (ways[0], sizes[0])
    for _ in range(150):
        collective, size = (
            previous if draw(3) else (ways[draw(len(ways))], sizes[draw(len(sizes))])
        )
        previous = (collective, size)
        x = torch.arange(float(size)) + comm.rank
        if draw(8):
            everyone = [torch.arange(float(size)) + r for r in range(comm.size)]
            expected = {
                ways[2]: torch.cat(
                    [rows[: size - r] for r, rows in enumerate(everyone)]
                ),
                ways[3]: torch.stack(everyone).sum(0),
                ways[4]: x,
            }.get(collective, torch.cat(everyone))
            assert torch.equal(collective(x), expected)
            continue
        odd = draw(comm.size)
        odd_collective = ways[draw(2)]
        # a dtype of its own: it always differs
        odd_tensor = torch.ones(sizes[draw(len(sizes))], dtype=torch.float64)
        start_time = time.monotonic()
        with pytest.raises(MismatchError) as caught:
            odd_collective(odd_tensor) if comm.rank == odd else collective(x)
        # thousandths of a second; the bound is for a busy machine
        assert time.monotonic() - start_time < 5
        assert f"[{len(odd_tensor)}] float64" in str(caught.value)
        assert str(caught.value).count("float32") == comm.size - 1


@ranks(2, 4)
def test_a_mismatch_of_sizes_is_found(
    ctx: ProcessContext,
) -> None:
    comm = ctx.world
    for lengths in ([4, 4000], [4000, 4]):
        with pytest.raises(
            MismatchError, match=rf"rank 0: gather of tensor: \[{lengths[0]}\]"
        ) as caught:
            ops.gather(torch.ones(lengths[min(comm.rank, 1)]), comm)
        assert f"rank 1: gather of tensor: [{lengths[1]}]" in str(caught.value)
        with pytest.raises(MismatchError, match=r"rank 1: reduce sum of tensor"):
            ops.reduce(torch.ones(4), comm) if comm.rank else ops.gather(
                torch.ones(lengths[0]), comm
            )
    assert ops.gather(torch.ones(1), comm).shape == (comm.size,)


@ranks(2, exhaustive=(4,))
def test_barrier_names_who_is_missing_and_where(ctx: ProcessContext) -> None:
    comm = ctx.world
    for _ in range(5):
        comm.barrier("together")
    started = time.monotonic()
    if comm.rank == 0:
        with pytest.raises(MissingRanksError, match="rank 1 has not arrived") as caught:
            comm.barrier("alone", timeout_s=0.3)
        assert caught.value.missing == tuple(range(1, comm.size))
        assert time.monotonic() - started < 3
    twin = comm.make_twin()
    with pytest.raises(MissingRanksError, match="instead"):
        twin.barrier(f"place {min(comm.rank, 1)}", timeout_s=0.5)


@ranks(2, 3)
def test_an_error_on_one_rank_reaches_all(ctx: ProcessContext) -> None:
    failing = ctx.world.size - 1
    expected: type[Exception] = (
        ZeroDivisionError if ctx.rank == failing else PeerFailedError
    )
    with pytest.raises(expected) as caught, agree(ctx.world, "loading"):
        _ = 1 / (0 if ctx.rank == failing else 1)
    if ctx.rank != failing:
        assert f"rank {failing} raised ZeroDivisionError" in str(caught.value)


@ranks(2, 4)
def test_flag_raised_anywhere_is_seen_everywhere_once(ctx: ProcessContext) -> None:
    flag = Flag(ctx.world)
    assert not flag.check()
    if ctx.rank == ctx.world.size - 1:
        flag.set()
    assert flag.check()
    assert not flag.check()


@ranks(4, mesh={"dp_replicate": 2, "tp": 2})
def test_collectives_along_axes_of_a_mesh(ctx: ProcessContext) -> None:
    batch, tensor, full_mesh = (
        ctx.groups(*BATCH),
        ctx.groups(Axis.TP),
        ctx.groups(*Axis),
    )
    assert batch.ranks == ctx.mesh.peers(ctx.rank, *BATCH)
    assert ops.gather(torch.tensor([ctx.rank]), batch).tolist() == list(batch.ranks)
    assert ops.gather(torch.tensor([ctx.rank]), tensor).tolist() == list(tensor.ranks)
    assert full_mesh.size == 4
    assert ctx.groups(*BATCH) is batch
    assert ctx.groups(Axis.CP).size == 1


@ranks(2)
def test_one_element_of_a_column_is_gathered(ctx: ProcessContext) -> None:
    column = torch.full((1, 2), float(ctx.rank))[:, 1]
    assert column.stride() == (2,)
    accelerator = Accelerator(context=ctx)
    assert accelerator.gather(column).tolist() == [0.0, 1.0]
    assert accelerator.gather_for_metrics(column).tolist() == [0.0, 1.0]
