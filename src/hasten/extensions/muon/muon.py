"""Muon: momentum of matrices, orthogonalised before it is applied. Works on whole, sharded and stacked matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hasten.errors import ConfigError
from hasten.modules.names import is_dtensor, local_tensor, placements

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

AdjustLr = Literal["original", "match_rms_adamw"]
COEFFICIENTS: Final = (3.4445, -4.775, 2.0315)
"""Coefficients of the quintic Newton–Schulz iteration, as in torch.optim.Muon."""


class Muon(Optimizer):
    """Muon for matrices (2-D) and stacks of matrices (3-D, one per expert), with the options of `torch.optim.Muon`.

    The update of a sharded matrix equals the update of the whole matrix: shards of equal layout are exchanged so that
    each rank orthogonalises whole matrices, every matrix once, while the next exchange is under way. Momentum stays
    sharded. `iteration_dtype` is the precision of the Newton–Schulz iteration: bfloat16 on an accelerator and float32 on
    the CPU by default.
    """

    def __init__(
        self,
        # Any: parameters, named parameters or groups, as every torch optimizer takes them
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr | None = None,
        iteration_dtype: torch.dtype | None = None,
    ) -> None:
        _check_options(
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults)
        self._dtype = iteration_dtype
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim not in (2, 3):
                    raise ConfigError(
                        f"Muon received a parameter of shape {tuple(parameter.shape)}; it updates matrices (2-D) and "
                        "stacks of matrices (3-D) only. Give other parameters to AdamW; "
                        "`hasten.optimizers(model, kind='muon')` splits a model's parameters."
                    )

    @torch.no_grad()
    # Any: the closure's loss
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Ranks: every rank that holds a shard."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:  # Any: a group's options
        parameters = [member for member in group["params"] if member.grad is not None]
        parameters_by_layout: dict[object, list[Tensor]] = {}
        for parameter in parameters:
            parameters_by_layout.setdefault(_shard_layout(parameter), []).append(
                parameter
            )
        for members in parameters_by_layout.values():
            directions = [
                self._update_momentum(parameter, group) for parameter in members
            ]
            first = members[0]
            orthogonal_shards = _orthogonalise_shards(
                first, directions, _Iteration.for_parameter(group, self._dtype, first)
            )
            learning_rate = group["lr"] * _rate_factor(
                group["adjust_lr_fn"], first.shape
            )
            weights = list(map(local_tensor, members))
            if group["weight_decay"]:
                torch._foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"])
            for weight, update in zip(weights, orthogonal_shards, strict=True):
                weight.add_(
                    update.to(weight.device, weight.dtype), alpha=-learning_rate
                )

    # Any: a group's options
    def _update_momentum(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Update the momentum of a parameter and return the local shard of the matrix to orthogonalise."""
        gradient = parameter.grad
        assert gradient is not None
        if (
            is_dtensor(parameter)
            and is_dtensor(gradient)
            and gradient.placements != parameter.placements
        ):
            gradient = gradient.redistribute(placements=parameter.placements)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(
                parameter, memory_format=torch.preserve_format
            )
        local_momentum = local_tensor(state["momentum_buffer"])
        local_gradient = local_tensor(gradient)
        local_momentum.lerp_(
            local_gradient.to(local_momentum.dtype), 1.0 - group["momentum"]
        )
        if group["nesterov"]:
            return local_gradient.to(local_momentum.dtype).lerp(
                local_momentum, group["momentum"]
            )
        return local_momentum


def _check_options(**options: Any) -> None:  # Any: options of every type
    for option in ("lr", "weight_decay"):
        if not options[option] >= 0.0:
            raise ConfigError(
                f"Muon({option}={options[option]}) is negative; set {option} to 0 or more."
            )
    if not 0.0 <= options["momentum"] < 1.0:
        raise ConfigError(
            f"Muon(momentum={options['momentum']}) is outside [0, 1); 0.95 is usual."
        )
    if not 1 <= options["ns_steps"] < 100:
        raise ConfigError(
            f"Muon(ns_steps={options['ns_steps']}) is outside 1..99; 5 is usual."
        )
    if options["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        raise ConfigError(
            f"Muon(adjust_lr_fn={options['adjust_lr_fn']!r}) is unknown; use 'original' or 'match_rms_adamw'."
        )


def _rate_factor(kind: AdjustLr | None, shape: Sequence[int]) -> float:
    """Return the factor of the learning rate for a matrix of this shape."""
    num_rows, num_columns = shape[-2:]
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(num_rows, num_columns))
    return math.sqrt(max(1.0, num_rows / num_columns))


@dataclass(frozen=True, slots=True)
class _Iteration:
    """Options of the Newton–Schulz iteration, and where it runs."""

    coefficients: tuple[float, float, float]
    eps: float
    steps: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    # Any: options
    def for_parameter(
        cls, group: dict[str, Any], dtype: torch.dtype | None, parameter: Tensor
    ) -> _Iteration:
        local_shard = local_tensor(parameter)
        device = local_shard.device
        # offloaded to the host
        if is_dtensor(parameter) and parameter.device_mesh.device_type != device.type:
            device_type = parameter.device_mesh.device_type
            device = torch.device(
                device_type, torch.get_device_module(device_type).current_device()
            )
        iteration_dtype = dtype or (
            torch.float32 if device.type == "cpu" else torch.bfloat16
        )
        return cls(
            tuple(group["ns_coefficients"]),
            group["eps"],
            group["ns_steps"],
            iteration_dtype,
            device,
        )

    def orthogonalise_matrices(self, matrices: Tensor) -> Tensor:
        """Return the matrices, stacked along the first dimension, with singular values close to one."""
        is_tall = matrices.shape[-2] > matrices.shape[-1]
        scaled_matrices = matrices.to(self.device, self.dtype)
        scaled_matrices = scaled_matrices.mT if is_tall else scaled_matrices
        scaled_matrices = scaled_matrices / scaled_matrices.norm(
            dim=(-2, -1), keepdim=True
        ).clamp(min=self.eps)
        a, b, c = self.coefficients
        for _ in range(self.steps):
            gram = scaled_matrices @ scaled_matrices.mT
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            scaled_matrices = torch.baddbmm(
                scaled_matrices, polynomial, scaled_matrices, beta=a
            )
        return scaled_matrices.mT if is_tall else scaled_matrices


def _shard_layout(parameter: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for parameters whose shards can be exchanged together."""
    mesh: tuple[object, ...] = ()
    if is_dtensor(parameter):
        mesh = (id(parameter.device_mesh), parameter.placements)
    return (tuple(parameter.shape), parameter.dtype, parameter.device, mesh)


def _orthogonalise_shards(
    like: Tensor, directions: Sequence[Tensor], iteration: _Iteration
) -> list[Tensor]:
    """Return the local shards of the orthogonalised matrices, whose local shards are `directions`."""
    sharded_axes = _sharded_axes(like) if is_dtensor(like) else []
    if not sharded_axes or not is_dtensor(like):
        return list(_orthogonalise_stack(torch.stack(list(directions)), iteration))
    shard_class = placements().Shard
    # Any: shards have a dimension, other placements none
    axis_placements: list[Any] = [like.placements[axis] for axis in sharded_axes]
    # whole matrices on each rank
    shards_stack = [
        type(placement) is shard_class and placement.dim == 0
        for placement in axis_placements
    ]
    if like.ndim == 3 and all(shards_stack):
        return list(_orthogonalise_stack(torch.stack(list(directions)), iteration))
    if len(sharded_axes) == 1 and type(axis_placements[0]) is shard_class:
        group = like.device_mesh.get_group(sharded_axes[0])
        return _Exchange(
            group, axis_placements[0].dim, tuple(like.shape), iteration
        ).run_rounds(directions)
    return _orthogonalise_gathered(like, directions, iteration)


def _sharded_axes(parameter: DTensor) -> list[int]:
    axis_placements = parameter.placements
    sharded_axes = []
    for axis, placement in enumerate(axis_placements):
        if not placement.is_replicate() and parameter.device_mesh.size(axis) > 1:
            sharded_axes.append(axis)
    return sharded_axes


def _orthogonalise_stack(stacked: Tensor, iteration: _Iteration) -> Tensor:
    """Orthogonalise whole matrices, or whole stacks of matrices, stacked along the first dimension."""
    if not stacked.numel():
        return stacked
    return iteration.orthogonalise_matrices(stacked.flatten(0, -3)).view(stacked.shape)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Exchange of shards along one mesh axis: each rank receives whole matrices and returns their shards."""

    group: dist.ProcessGroup
    dim: int
    shape: tuple[int, ...]
    iteration: _Iteration

    def run_rounds(self, directions: Sequence[Tensor]) -> list[Tensor]:
        """Return the local shards of the orthogonalised matrices. Ranks: every rank of the group."""
        num_ranks = self.group.size()
        rounds = []
        for start in range(0, len(directions), num_ranks):
            rounds.append(directions[start : start + num_ranks])
        local_shards: list[Tensor] = []
        sending = self._send_shards(rounds[0])
        returning: tuple[dist.Work, Tensor, int] | None = None
        for round_index, members in enumerate(rounds):
            matrix = self._receive_matrix(sending, len(members))
            if round_index + 1 < len(rounds):
                # under way while this round's matrix is computed
                sending = self._send_shards(rounds[round_index + 1])
            matrix_update = None
            if matrix is not None:
                matrix_update = _orthogonalise_stack(matrix[None], self.iteration)[0]
            if returning is not None:
                local_shards += self._receive_results(returning)
            returning = self._send_results(matrix_update, len(members))
        assert returning is not None
        return local_shards + self._receive_results(returning)

    def _shard_sizes(self) -> list[int]:
        """Return the extent of each rank's shard along the sharded dimension, as torch splits it."""
        full_extent = self.shape[self.dim]
        num_ranks = self.group.size()
        shard_extent = -(-full_extent // num_ranks)
        sizes = []
        for shard_rank in range(num_ranks):
            remaining_extent = full_extent - shard_rank * shard_extent
            sizes.append(max(0, min(shard_extent, remaining_extent)))
        return sizes

    def _count_elements(self, extent: int) -> int:
        return math.prod(self.shape) // max(1, self.shape[self.dim]) * extent

    def _send_shards(self, members: Sequence[Tensor]) -> tuple[dist.Work, Tensor]:
        """Start to send the shard of matrix i to rank i."""
        own_rank = self.group.rank()
        send_buffer = torch.cat([member.reshape(-1) for member in members]).to(
            self.iteration.device, self.iteration.dtype
        )
        num_own_values = self._count_elements(self._shard_sizes()[own_rank])
        if own_rank < len(members):
            receive_sizes = list(map(self._count_elements, self._shard_sizes()))
        else:
            receive_sizes = [0] * self.group.size()
        receive_buffer = send_buffer.new_empty(sum(receive_sizes))
        send_sizes = [num_own_values] * len(members)
        send_sizes += [0] * (self.group.size() - len(members))
        work = dist.all_to_all_single(
            receive_buffer,
            send_buffer,
            receive_sizes,
            send_sizes,
            group=self.group,
            async_op=True,
        )
        assert work is not None
        return work, receive_buffer

    def _receive_matrix(
        self, sending: tuple[dist.Work, Tensor], num_matrices: int
    ) -> Tensor | None:
        """Return this rank's whole matrix of the round; None if there are fewer matrices than ranks."""
        work, receive_buffer = sending
        work.wait()
        if self.group.rank() >= num_matrices:
            return None
        shards = torch.split(
            receive_buffer, list(map(self._count_elements, self._shard_sizes()))
        )
        shard_views = []
        for shard, extent in zip(shards, self._shard_sizes(), strict=True):
            shard_views.append(shard.view(self._shard_shape(extent)))
        return torch.cat(
            shard_views,
            dim=self.dim,
        )

    def _shard_shape(self, extent: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], extent, *self.shape[self.dim + 1 :])

    def _send_results(
        self, matrix: Tensor | None, num_matrices: int
    ) -> tuple[dist.Work, Tensor, int]:
        """Start to send each rank its shard of this rank's orthogonalised matrix."""
        own_rank = self.group.rank()
        num_ranks = self.group.size()
        num_own_values = self._count_elements(self._shard_sizes()[own_rank])
        if matrix is None:
            send_buffer = torch.empty(
                0, dtype=self.iteration.dtype, device=self.iteration.device
            )
            send_sizes = [0] * num_ranks
        else:
            shards = torch.split(matrix, self._shard_sizes(), dim=self.dim)
            send_buffer = torch.cat([shard.reshape(-1) for shard in shards])
            send_sizes = list(map(self._count_elements, self._shard_sizes()))
        receive_buffer = send_buffer.new_empty(num_own_values * num_matrices)
        num_senders = min(num_matrices, num_ranks)
        receive_sizes = [num_own_values] * num_senders
        receive_sizes += [0] * (num_ranks - num_senders)
        work = dist.all_to_all_single(
            receive_buffer,
            send_buffer,
            receive_sizes,
            send_sizes,
            group=self.group,
            async_op=True,
        )
        assert work is not None
        return work, receive_buffer, num_matrices

    def _receive_results(
        self, returning: tuple[dist.Work, Tensor, int]
    ) -> list[Tensor]:
        """Return this rank's shards of a round's orthogonalised matrices."""
        work, receive_buffer, num_matrices = returning
        work.wait()
        shape = self._shard_shape(self._shard_sizes()[self.group.rank()])
        return [shard.view(shape) for shard in receive_buffer.view(num_matrices, -1)]


def _orthogonalise_gathered(
    like: DTensor, directions: Sequence[Tensor], iteration: _Iteration
) -> list[Tensor]:
    """Orthogonalise matrices sharded along several mesh axes: gather, compute each on one rank, share the results."""
    mesh = like.device_mesh
    tensor_module = placements()
    mesh_coordinate = mesh.get_coordinate()
    assert mesh_coordinate is not None
    num_ranks = mesh.size()
    rank_index = 0
    for axis, coordinate in enumerate(mesh_coordinate):
        rank_index = rank_index * mesh.size(axis) + coordinate
    local_shards: list[Tensor] = []
    for start in range(0, len(directions), num_ranks):
        members = directions[start : start + num_ranks]
        matrices = []
        for member in members:
            matrices.append(
                _gather_matrix(member.to(iteration.device, iteration.dtype), like)
            )
        if rank_index < len(members):
            own_update = _orthogonalise_stack(matrices[rank_index][None], iteration)
        else:
            own_update = torch.zeros_like(matrices[0])[None]
        for axis in reversed(range(mesh.ndim)):
            own_update = _gather_tensors(own_update.contiguous(), mesh.get_group(axis))
        for matrix in own_update[: len(members)]:
            sharded_matrix = tensor_module.distribute_tensor(
                matrix.contiguous(), mesh, like.placements, src_data_rank=None
            )
            local_shards.append(sharded_matrix.to_local())
    return local_shards


def _gather_matrix(local: Tensor, like: DTensor) -> Tensor:
    """Return the whole tensor of which every rank gives its shard, gathered along one mesh axis after the other."""
    tensor_module = placements()
    matrix = tensor_module.DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    axis_placements = list(like.placements)
    axes = sorted(
        range(len(axis_placements)),
        key=lambda axis: (type(axis_placements[axis]) is tensor_module.Shard, -axis),
    )  # the inner cut first
    for axis in axes:
        axis_placements[axis] = tensor_module.Replicate()
        matrix = matrix.redistribute(placements=axis_placements)
    local_matrix: Tensor = matrix.to_local()
    return local_matrix


def _gather_tensors(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return tensor
    gathered_tensors = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(gathered_tensors, tensor, group=group)
    return torch.cat(gathered_tensors)
