"""Which rank writes which slice: every element of a checkpoint exactly once, and whole tensors where they are gathered."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from hasten.checkpoint.base import Component, Slice, StateTree
from hasten.checkpoint.ownership import (
    MachineOwners,
    divide_stages,
    gather_slices,
    owned_by_axes,
)
from hasten.comm.agreement import agreeing
from hasten.comm.base import Comm
from hasten.modules.names import StagePart
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import Axis, MeshSpec
from hasten.runtime.topology import Topology
from tests.support.thread_group import on_threads


def slice_of(tensor: Tensor | Slice) -> Slice:
    assert isinstance(tensor, Slice)
    return tensor


# -- by mesh axes --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("is_axis_first", [True, False])
@pytest.mark.parametrize("is_first_holder", [True, False])
def test_slices_of_the_mesh_belong_to_the_first_rank_along_all_other_axes(
    is_axis_first: bool, is_first_holder: bool
) -> None:
    data = torch.zeros(2)
    on_mesh = Slice(data, (4,), (0,), not is_axis_first, ("dp_shard",), is_first_holder)
    of_experts = Slice(data, (4,), (0,), True, ("dp_shard", "ep"), is_first_holder)
    of_user = Slice(data, (4,), (0,), is_first_holder)
    queried_axes: list[tuple[str, ...]] = []

    def is_first(axes: tuple[str, ...]) -> bool:
        queried_axes.append(axes)
        return is_axis_first

    tensors: dict[str, Tensor | Slice] = {
        "mesh": on_mesh,
        "experts": of_experts,
        "user": of_user,
        "whole": data,
    }
    tree = StateTree({"model": Component(tensors, {"a": 1}, "model")})
    component = owned_by_axes(tree, is_first).components["model"]
    assert slice_of(component.tensors["mesh"]).owned is (
        is_axis_first and is_first_holder
    )
    for name in ("experts", "user", "whole"):
        assert component.tensors[name] is tensors[name]
    assert queried_axes == ([("dp_shard",)] if is_first_holder else [])
    assert (component.data, component.kind) == ({"a": 1}, "model")


# -- by pipeline stages --------------------------------------------------------------------------------------------
class Stage(nn.Module):
    """Layers `a` and `tied` on the first stage, `b` and `tied` on the second: the tied one is written by the first."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.register_parameter(
            "ab"[stage], nn.Parameter(torch.full((2,), stage + 1.0))
        )
        self.tied = nn.Parameter(torch.full((3,), 7.0))
        keys = ("a", "tied", "b")
        self.__dict__["stage_part"] = StagePart(
            keys,
            frozenset(keys),
            frozenset({"a", "tied"} if stage == 0 else {"b"}),
            copies=frozenset() if stage == 0 else frozenset({"tied"}),
        )


def state_of(stage: int, prefix: str = "") -> StateTree:
    """A model and its optimizer as a stage would save them."""
    name = "ab"[stage]
    model_tensors = {name: torch.full((2,), stage + 1.0), "tied": torch.full((3,), 7.0)}
    moments = {
        f"state/{prefix}{parameter}/exp_avg": tensor + 10
        for parameter, tensor in model_tensors.items()
    }
    # Any: JSON
    data: Any = {
        "state": {
            f"{prefix}{parameter}": {"step": stage} for parameter in model_tensors
        },
        "param_groups": [
            {"lr": 0.5, "params": [f"{prefix}{name}", f"{prefix}tied"]},
            {"lr": 0.25, "params": [f"{prefix}{name}2"]},
        ],
        "version": stage,
    }
    return StateTree(
        {
            "model": Component(model_tensors, None, "model"),
            "optimizer": Component(moments, data, "optimizer"),
            "scheduler": Component({}, {"last_epoch": 3}),
        }
    )


def context(
    comm: Comm, mesh: MeshSpec, rank: int, queried_axes: list[Any]
) -> ProcessContext:
    """The context of one rank whose group along any axes is `comm`."""
    topology = Topology(
        rank=rank,
        world_size=mesh.world_size,
        local_rank=rank,
        local_world_size=mesh.world_size,
    )

    def groups(*axes: Axis) -> Comm:
        queried_axes.append(set(axes))
        return comm

    return ProcessContext(topology, mesh, torch.device("cpu"), comm, groups)


def owned_names(component: Component) -> set[str]:
    return {
        name for name, tensor in component.tensors.items() if slice_of(tensor).owned
    }


def test_every_tensor_of_a_pipeline_is_written_by_one_stage() -> None:
    mesh = MeshSpec(pp=2, dp_replicate=2)
    for column in range(2):
        queried_axes: list[Any] = []

        def divide(
            comm: Comm, column: int = column, queried_axes: list[Any] = queried_axes
        ) -> StateTree:
            ctx = context(comm, mesh, 2 * comm.rank + column, queried_axes)
            return divide_stages(state_of(comm.rank), [Stage(comm.rank)], ctx)

        trees = on_threads(divide, 2)
        assert queried_axes == [{Axis.PP}] * 2
        written = [
            {
                component: owned_names(tree.components[component])
                for component in ("model", "optimizer")
            }
            for tree in trees
        ]
        # the replicas of the second column write nothing
        is_writer = column == 0
        assert written == [
            {
                "model": {"a", "tied"} if is_writer else set(),
                "optimizer": {"state/a/exp_avg", "state/tied/exp_avg"}
                if is_writer
                else set(),
            },
            {
                "model": {"b"} if is_writer else set(),
                "optimizer": {"state/b/exp_avg"} if is_writer else set(),
            },
        ]
        for tree in trees:
            optimizer = tree.components["optimizer"]
            assert optimizer.data == {
                "state": {"a": {"step": 0}, "tied": {"step": 0}, "b": {"step": 1}},
                "param_groups": [
                    {"lr": 0.5, "params": ["a", "tied", "b"]},
                    {"lr": 0.25, "params": ["a2", "b2"]},
                ],
                "version": 0,
            }
            assert tree.components["scheduler"] == Component({}, {"last_epoch": 3})
            tied = slice_of(tree.components["model"].tensors["tied"])
            assert (tied.shape, tied.offset) == ((3,), (0,))
            assert torch.equal(tied.data, torch.full((3,), 7.0))


def test_a_second_model_has_names_of_its_own() -> None:
    mesh = MeshSpec(pp=2)

    def divide(comm: Comm) -> StateTree:
        tree = state_of(comm.rank, "model_1.").components
        plain = Component(
            {"weight": torch.zeros(1), "bias": torch.zeros(1)}, None, "model"
        )
        ctx = context(comm, mesh, comm.rank, [])
        components = {
            "model": plain,
            "model_1": tree["model"],
            "optimizer": tree["optimizer"],
        }
        return divide_stages(
            StateTree(components), [nn.Linear(1, 1), Stage(comm.rank)], ctx
        )

    first, second = on_threads(divide, 2)
    # a model that is not split is written by every stage that is told to
    assert owned_names(first.components["model"]) == {"weight", "bias"}
    assert owned_names(first.components["model_1"]) == {"a", "tied"}
    assert owned_names(second.components["model_1"]) == {"b"}
    assert owned_names(second.components["optimizer"]) == {"state/model_1.b/exp_avg"}


def test_slices_of_a_stage_keep_their_owner() -> None:
    stage = Stage(0)
    stage.__dict__["stage_part"] = StagePart(
        ("a", "b"), frozenset("ab"), frozenset("a")
    )
    slices: dict[str, Tensor | Slice] = {
        "a": Slice(torch.zeros(1), (2,), (0,), False),
        "b": Slice(torch.zeros(1), (2,), (0,), True),
        "c": torch.zeros(1),
    }
    tree = StateTree(
        {"model": Component(slices, None, "model", main_only=frozenset("c"))}
    )

    def divide(comm: Comm) -> StateTree:
        return divide_stages(
            tree, [stage], context(comm, MeshSpec(dp_replicate=2), 1, [])
        )

    component = on_threads(divide, 1)[0].components["model"]
    assert owned_names(component) == set()
    assert component.main_only == frozenset()


@pytest.mark.parametrize(
    ("rank", "written"),
    [(0, {"a"}), (1, set())],
)
def test_one_of_several_holders_of_a_stage_writes_it(
    rank: int, written: set[str]
) -> None:
    stage = Stage(0)
    stage.__dict__["stage_part"] = StagePart(("a",), frozenset("a"), frozenset("a"))
    tree = StateTree({"model": Component({"a": torch.zeros(2)}, None, "model")})

    def divide(comm: Comm) -> StateTree:
        return divide_stages(tree, [stage], context(comm, MeshSpec.flat(2), rank, []))

    assert owned_names(on_threads(divide, 1)[0].components["model"]) == written


def test_without_stages_nothing_changes() -> None:
    def divide(comm: Comm, mesh: MeshSpec) -> bool:
        tree = state_of(0)
        ctx = context(comm, mesh, 0, [])
        return divide_stages(tree, [nn.Linear(2, 2)], ctx) is tree

    assert on_threads(lambda comm: divide(comm, MeshSpec(tp=2)), 1) == [True]
    # with a pipeline, a model that is not split is still marked as slices
    assert on_threads(lambda comm: divide(comm, MeshSpec(pp=2)), 1) == [False]


# -- gathered ------------------------------------------------------------------------------------------------------
def grid(num_ranks: int, shape: tuple[int, int], dim: int) -> list[tuple[int, int]]:
    """(start, length) of each rank's rows or columns; the last ones may be short or empty."""
    step = -(-shape[dim] // num_ranks)
    starts = [min(rank * step, shape[dim]) for rank in range(num_ranks)]
    return [(start, min(start + step, shape[dim]) - start) for start in starts]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_slices_are_gathered_whole_where_they_are_kept(
    num_ranks: int, dim: int
) -> None:
    shape = (5, 3)
    full = torch.arange(15.0).reshape(shape)

    def gather(comm: Comm) -> StateTree:
        start, length = grid(num_ranks, shape, dim)[comm.rank]
        data = full.narrow(dim, start, length).clone()
        offset = (start, 0) if dim == 0 else (0, start)
        copied = torch.full((2,), float(comm.rank))
        weight = Slice(data, shape, offset)
        tensors: dict[str, Tensor | Slice] = {
            "weight": weight,
            "tied": weight,
            "buffer": torch.ones(2),
            # the same slice on all ranks, of which the last one owns it
            "copy": Slice(copied, (2,), (0,), comm.rank == num_ranks - 1),
        }
        components = {
            "model": Component(tensors, {"a": 1}, "model"),
            "plain": Component({"x": torch.zeros(1)}),
            "ranks": Component({"x": weight}, per_rank=True),
        }
        return gather_slices(StateTree(components), comm, keeps=comm.rank != 1)

    for rank, tree in enumerate(on_threads(gather, num_ranks)):
        model = tree.components["model"]
        tensors = cast("dict[str, Tensor]", model.tensors)
        assert (model.data, model.kind) == ({"a": 1}, "model")
        assert model.main_only == {"weight", "tied", "buffer", "copy"}
        assert tensors["tied"] is tensors["weight"]
        assert tensors["weight"].shape == full.shape
        assert torch.equal(tensors["buffer"], torch.ones(2))
        if rank == 1:
            assert tensors["weight"].untyped_storage().nbytes() == 4
            continue
        assert torch.equal(tensors["weight"], full)
        assert tensors["copy"].tolist() == [num_ranks - 1.0] * 2
        assert not tree.components["plain"].main_only
        assert slice_of(tree.components["ranks"].tensors["x"]).shape == shape


def test_empty_slices_are_not_taken_for_tied_ones() -> None:
    def gather(comm: Comm) -> StateTree:
        tensors = {
            "first": Slice(torch.zeros(0, 2), (0, 2), (0, 0)),
            "second": Slice(torch.zeros(0, 2), (0, 2), (0, 0)),
        }
        return gather_slices(StateTree({"model": Component(tensors)}), comm, True)

    for tree in on_threads(gather, 2):
        tensors = tree.components["model"].tensors
        assert tensors["first"] is not tensors["second"]


# -- by machines ---------------------------------------------------------------------------------------------------
def layout(rank: int, layouts: Sequence[Sequence[int]]) -> StateTree:
    """Slices of which rank r holds the pieces at `layouts[r]`, and one tensor that is whole."""
    tensors: dict[str, Tensor | Slice] = {
        f"t{index}": Slice(torch.zeros(1), (4,), (offset,), False)
        for index, offset in enumerate(layouts[rank])
    }
    return StateTree({"model": Component({**tensors, "buffer": torch.zeros(1)})})


def test_on_every_machine_the_first_rank_with_a_slice_owns_it() -> None:
    # ranks 0 and 1 are one machine, 2 and 3 another
    for layouts in itertools.product(itertools.product(range(2), repeat=2), repeat=3):
        pieces = (*layouts, layouts[0])

        def decide(
            comm: Comm, pieces: tuple[tuple[int, ...], ...] = pieces
        ) -> list[set[str]]:
            machine = [0, 1] if comm.rank < 2 else [2, 3]
            owners = MachineOwners()
            owned = []
            # the second time nothing has changed
            for num_expected in (2, 1):
                initial_collectives = comm.num_collectives  # type: ignore[attr-defined]
                with agreeing(comm, "dividing") as agreement:
                    tree = owners.owned(layout(comm.rank, pieces), machine, agreement)
                final_collectives = comm.num_collectives  # type: ignore[attr-defined]
                assert final_collectives - initial_collectives == num_expected + 1
                component = tree.components["model"]
                assert isinstance(component.tensors["buffer"], Tensor)
                owned.append(
                    {
                        name
                        for name, tensor in component.tensors.items()
                        if isinstance(tensor, Slice) and tensor.owned
                    }
                )
            return owned

        for rank, owned in enumerate(on_threads(decide, 4)):
            earlier = pieces[rank - 1] if rank % 2 else ()
            expected = {
                f"t{index}"
                for index, offset in enumerate(pieces[rank])
                if not earlier or earlier[index] != offset
            }
            assert owned == [expected, expected], (pieces, rank)


def test_a_changed_layout_is_exchanged_again() -> None:
    def decide(comm: Comm) -> list[bool]:
        owners = MachineOwners()
        owned = []
        for pieces in ([[0], [0]], [[0], [1]]):
            with agreeing(comm, "dividing") as agreement:
                tree = owners.owned(layout(comm.rank, pieces), [0, 1], agreement)
            owned.append(slice_of(tree.components["model"].tensors["t0"]).owned)
        return owned

    assert on_threads(decide, 2) == [[True, True], [False, True]]
