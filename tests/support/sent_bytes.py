"""Counter of the bytes that this rank sends within a block, per collective and mesh axis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from hasten.runtime.bytes_plan import Traffic, all_reduced_bytes, exchanged_bytes
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import AXES, EXPERTS, SHARD, Axis, MeshSpec

ContextWay = Literal["allgather", "ulysses"]
_CALLED: Final = "c10d"
_FUNCTIONAL: Final = "_c10d_functional"
_SHARDING: Final = ("_allgather_base_", "_reduce_scatter_base_")
"""Collectives called by fully_shard, but not by token exchanges."""
_ALL_TO_ALL: Final = ("alltoall_base_", "all_to_all_single")


class SentBytes(TorchDispatchMode):
    """Counter of the bytes that leave this rank, assuming bandwidth-optimal collectives as in `runtime.bytes_plan`.

    Any in this class: operators and arguments of torch's dispatcher.
    """

    def __init__(self, mesh: MeshSpec, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._mesh = mesh
        self._rank = rank
        self.by_kind: dict[tuple[str, str], float] = {}
        """Bytes by axis and operator."""
        self.unknown: dict[str, int] = {}
        """Operators that are not counted, with their number of calls."""

    @property
    def by_axis(self) -> Traffic:
        """Bytes by axis; several axes are joined, as in `dp_replicate+dp_shard`."""
        total: Traffic = {}
        for (axis, _), num_bytes in self.by_kind.items():
            total[axis] = total.get(axis, 0) + num_bytes
        return total

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in (_CALLED, _FUNCTIONAL):
            self._see(
                func.name().partition("::")[2].partition(".")[0], func.namespace, args
            )
        return func(*args, **(kwargs or {}))

    def _see(self, name: str, space: str, args: tuple[Any, ...]) -> None:
        group = _group_of(args) if space == _CALLED else _named_group(args)
        if group is None:
            return
        num_bytes = (
            _called(name, args, group.size())
            if space == _CALLED
            else _functional(name, args, group.size())
        )
        if num_bytes is None:
            self.unknown[name] = self.unknown.get(name, 0) + 1
        elif num_bytes:
            key = (
                axis_of(
                    self._mesh,
                    self._rank,
                    tuple(sorted(dist.get_process_group_ranks(group))),
                    name,
                ),
                name,
            )
            self.by_kind[key] = self.by_kind.get(key, 0) + num_bytes


@contextmanager
def count_sent(ctx: ProcessContext) -> Iterator[SentBytes]:
    """Context manager that counts the bytes of collectives. Ranks: each independently."""
    counter = SentBytes(ctx.mesh, ctx.rank)
    with counter:
        yield counter


def axis_of(mesh: MeshSpec, rank: int, ranks: tuple[int, ...], operator: str) -> str:
    """Return the axis, or axes joined by `+`, along which `ranks` differ.

    Different axes may have the same ranks: experts exchange tokens among data-parallel ranks, and the
    shards of parameters are on the ranks of one sequence. The operator then decides.
    """
    neighbours = tuple(range(rank - rank % mesh.ep, rank - rank % mesh.ep + mesh.ep))
    if mesh.ep > 1 and ranks == neighbours and operator in _ALL_TO_ALL:
        return EXPERTS
    if mesh.cp > 1 and operator in _SHARDING and ranks == mesh.peers(rank, *SHARD):
        return str(Axis.DP_SHARD)
    wide = [axis for axis in AXES if mesh.size(axis) > 1]
    for number in range(1, len(wide) + 1):
        for axes in combinations(wide, number):
            if mesh.peers(rank, *axes) == ranks:
                return "+".join(axes)
    return "other ranks"


def _named_group(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Return the group of a functional collective, whose name is the last argument."""
    name: Any = args[-1] if args and isinstance(args[-1], str) else None
    return None if name is None else _resolve_process_group(name)


def _called(name: str, args: tuple[Any, ...], ranks: int) -> float | None:
    """Return the bytes sent by a collective on given tensors; None for an unknown collective."""
    match name:
        case "allreduce_" | "allreduce_coalesced_":
            return all_reduced_bytes(_bytes(args[0]), ranks)
        case "_allgather_base_" | "allgather_" | "allgather_into_tensor_coalesced_":
            return exchanged_bytes(_bytes(args[0]), ranks)
        case (
            "_reduce_scatter_base_"
            | "reduce_scatter_"
            | "reduce_scatter_tensor_coalesced_"
            | "alltoall_base_"
        ):
            return exchanged_bytes(_bytes(args[1]), ranks)
        case "send":
            return _bytes(args[0])
        case "recv_" | "recv_any_source_" | "barrier" | "monitored_barrier_":
            return 0
        case "broadcast_":  # forwarded by every rank but the last, as in a ring
            return exchanged_bytes(_bytes(args[0]), ranks)
    return None


def _functional(name: str, args: tuple[Any, ...], ranks: int) -> float | None:
    """Return the bytes sent by a collective that returns new tensors; None for an unknown collective."""
    match name:
        case "all_reduce" | "all_reduce_" | "all_reduce_coalesced":
            return all_reduced_bytes(_bytes(args[0]), ranks)
        case "all_gather_into_tensor" | "all_gather_into_tensor_coalesced":
            return exchanged_bytes(_bytes(args[0]) * ranks, ranks)
        case (
            "reduce_scatter_tensor"
            | "reduce_scatter_tensor_coalesced"
            | "all_to_all_single"
            | "broadcast"
        ):
            return exchanged_bytes(_bytes(args[0]), ranks)
    return None


def _bytes(values: Tensor | list[Any]) -> float:
    return float(
        sum(tensor.numel() * tensor.element_size() for tensor in _tensors_in(values))
    )


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Return the group of a collective, from its arguments in torch's dispatcher."""
    return next((group for arg in args if (group := _unboxed(arg)) is not None), None)


def _unboxed(arg: object) -> dist.ProcessGroup | None:
    if not isinstance(arg, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(arg)
    # another kind of object, such as a reduction operator
    except (RuntimeError, TypeError):
        return None


def _tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors of nested lists, in order."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in _tensors_in(value)]
    return []


def expert_traffic(
    mesh: MeshSpec,
    *,
    tokens: int,
    k: int,
    width: int,
    num_experts: int,
    item: int = 4,
    weight_item: int = 4,
) -> Traffic:
    """Return the bytes that a module of experts sends in a micro-step of `tokens` per rank, with `k` experts per token.

    Hidden states and weights are sent to the experts and results back, and likewise the gradients; counts are sent once.
    """
    rows = tokens * k
    sent = exchanged_bytes(rows * (width * item + weight_item), mesh.ep)
    returned = exchanged_bytes(rows * width * item, mesh.ep)
    return used_axes(
        {EXPERTS: 2 * (sent + returned) + exchanged_bytes(num_experts * 8, mesh.ep)}
    )


def context_traffic(
    mesh: MeshSpec,
    *,
    exchange: ContextWay,
    tokens: int,
    keys: int,
    queries: int,
    item: int = 4,
) -> Traffic:
    """Return the bytes that one attention sends in one micro-step of `tokens` per rank, without masks.

    `queries` is the width of all query heads, `keys` that of all key (or value) heads. allgather sends keys and
    values to every rank and returns their gradients; ulysses exchanges queries, keys, values and outputs, and the gradients of all.
    """
    ranks, once = mesh.cp, tokens * keys
    if exchange == "ulysses":
        sent = 2 * exchanged_bytes(2 * tokens * (queries + keys) * item, ranks)
    else:
        sent = 4 * (ranks - 1) * once * item
    return used_axes({Axis.CP: sent if ranks > 1 else 0})


def stage_traffic(
    mesh: MeshSpec,
    *,
    stage: int,
    tokens: int,
    width: int,
    item: int = 4,
    stages_per_rank: int = 1,
) -> Traffic:
    """Return the bytes that a pipeline rank sends for one batch of `tokens`: hidden states forward, gradients backward.

    `stage` is the rank's position along the axis. With several stages on each rank, consecutive stages form a ring over the ranks.
    """
    first, last = stage == 0, stage == mesh.pp - 1
    messages = 2 * stages_per_rank - first - last
    return used_axes({Axis.PP: messages * tokens * width * item})


def used_axes(sent: Traffic) -> Traffic:
    """The axes along which something is sent."""
    return {str(axis): num_bytes for axis, num_bytes in sent.items() if num_bytes}
