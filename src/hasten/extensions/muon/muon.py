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
        _check(
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
        parameters = [
            parameter for parameter in group["params"] if parameter.grad is not None
        ]
        alike: dict[object, list[Tensor]] = {}
        for parameter in parameters:
            alike.setdefault(_layout(parameter), []).append(parameter)
        for members in alike.values():
            directions = [self._direction(parameter, group) for parameter in members]
            first = members[0]
            orthogonal = _orthogonalised(
                first, directions, _Iteration.of(group, self._dtype, first)
            )
            rate = group["lr"] * _rate_factor(group["adjust_lr_fn"], first.shape)
            weights = [local_tensor(parameter) for parameter in members]
            if group["weight_decay"]:
                torch._foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"])
            for weight, update in zip(weights, orthogonal, strict=True):
                weight.add_(update.to(weight.device, weight.dtype), alpha=-rate)

    # Any: a group's options
    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
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
        momentum, slope = local_tensor(state["momentum_buffer"]), local_tensor(gradient)
        momentum.lerp_(slope.to(momentum.dtype), 1.0 - group["momentum"])
        return (
            slope.to(momentum.dtype).lerp(momentum, group["momentum"])
            if group["nesterov"]
            else momentum
        )


def _check(**options: Any) -> None:  # Any: options of every type
    for name in ("lr", "weight_decay"):
        if not options[name] >= 0.0:
            raise ConfigError(
                f"Muon({name}={options[name]}) is negative; set {name} to 0 or more."
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
    rows, columns = shape[-2:]
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


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
    def of(
        cls, group: dict[str, Any], dtype: torch.dtype | None, parameter: Tensor
    ) -> _Iteration:
        local = local_tensor(parameter)
        device = local.device
        # offloaded to the host
        if is_dtensor(parameter) and parameter.device_mesh.device_type != device.type:
            kind = parameter.device_mesh.device_type
            device = torch.device(kind, torch.get_device_module(kind).current_device())
        chosen = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        return cls(
            tuple(group["ns_coefficients"]),
            group["eps"],
            group["ns_steps"],
            chosen,
            device,
        )

    def run(self, matrices: Tensor) -> Tensor:
        """Return the matrices, stacked along the first dimension, with singular values close to one."""
        tall = matrices.shape[-2] > matrices.shape[-1]
        x = matrices.to(self.device, self.dtype)
        x = x.mT if tall else x
        x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=self.eps)
        a, b, c = self.coefficients
        for _ in range(self.steps):
            gram = x @ x.mT
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, polynomial, x, beta=a)
        return x.mT if tall else x


def _layout(parameter: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for parameters whose shards can be exchanged together."""
    mesh = (
        (id(parameter.device_mesh), parameter.placements)
        if is_dtensor(parameter)
        else ()
    )
    return (tuple(parameter.shape), parameter.dtype, parameter.device, mesh)


def _orthogonalised(
    like: Tensor, directions: Sequence[Tensor], iteration: _Iteration
) -> list[Tensor]:
    """Return the local shards of the orthogonalised matrices, whose local shards are `directions`."""
    axes = _sharded_axes(like) if is_dtensor(like) else []
    if not axes or not is_dtensor(like):
        return list(_whole(torch.stack(list(directions)), iteration))
    plain = placements().Shard
    # Any: shards have a dimension, other placements none
    kinds: list[Any] = [like.placements[axis] for axis in axes]
    # whole matrices on each rank
    if like.ndim == 3 and all(type(kind) is plain and kind.dim == 0 for kind in kinds):
        return list(_whole(torch.stack(list(directions)), iteration))
    if len(axes) == 1 and type(kinds[0]) is plain:
        group = like.device_mesh.get_group(axes[0])
        return _Exchange(group, kinds[0].dim, tuple(like.shape), iteration).run(
            directions
        )
    return _gathered(like, directions, iteration)


def _sharded_axes(parameter: DTensor) -> list[int]:
    kinds = parameter.placements
    return [
        axis
        for axis, kind in enumerate(kinds)
        if not kind.is_replicate() and parameter.device_mesh.size(axis) > 1
    ]


def _whole(stacked: Tensor, iteration: _Iteration) -> Tensor:
    """Orthogonalise whole matrices, or whole stacks of matrices, stacked along the first dimension."""
    if not stacked.numel():
        return stacked
    return iteration.run(stacked.flatten(0, -3)).view(stacked.shape)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Exchange of shards along one mesh axis: each rank receives whole matrices and returns their shards."""

    group: dist.ProcessGroup
    dim: int
    shape: tuple[int, ...]
    iteration: _Iteration

    def run(self, directions: Sequence[Tensor]) -> list[Tensor]:
        """Return the local shards of the orthogonalised matrices. Ranks: every rank of the group."""
        size = self.group.size()
        rounds = [
            directions[start : start + size]
            for start in range(0, len(directions), size)
        ]
        found: list[Tensor] = []
        sending = self._send(rounds[0])
        returning: tuple[dist.Work, Tensor, int] | None = None
        for number, members in enumerate(rounds):
            matrix = self._receive(sending, len(members))
            if number + 1 < len(rounds):
                # under way while this round's matrix is computed
                sending = self._send(rounds[number + 1])
            whole = None if matrix is None else _whole(matrix[None], self.iteration)[0]
            if returning is not None:
                found += self._returned(returning)
            returning = self._return(whole, len(members))
        assert returning is not None
        return found + self._returned(returning)

    def _sizes(self) -> list[int]:
        """Return the extent of each rank's shard along the sharded dimension, as torch splits it."""
        total, size = self.shape[self.dim], self.group.size()
        step = -(-total // size)
        return [max(0, min(step, total - rank * step)) for rank in range(size)]

    def _numel(self, extent: int) -> int:
        return math.prod(self.shape) // max(1, self.shape[self.dim]) * extent

    def _send(self, members: Sequence[Tensor]) -> tuple[dist.Work, Tensor]:
        """Start to send the shard of matrix i to rank i."""
        rank = self.group.rank()
        given = torch.cat([member.reshape(-1) for member in members]).to(
            self.iteration.device, self.iteration.dtype
        )
        own = self._numel(self._sizes()[rank])
        receives = (
            [self._numel(extent) for extent in self._sizes()]
            if rank < len(members)
            else [0] * self.group.size()
        )
        taken = given.new_empty(sum(receives))
        sends = [own if peer < len(members) else 0 for peer in range(self.group.size())]
        work = dist.all_to_all_single(
            taken, given, receives, sends, group=self.group, async_op=True
        )
        assert work is not None
        return work, taken

    def _receive(self, sending: tuple[dist.Work, Tensor], count: int) -> Tensor | None:
        """Return this rank's whole matrix of the round; None if there are fewer matrices than ranks."""
        work, taken = sending
        work.wait()
        if self.group.rank() >= count:
            return None
        shards = torch.split(taken, [self._numel(extent) for extent in self._sizes()])
        return torch.cat(
            [
                shard.view(self._shard_shape(extent))
                for shard, extent in zip(shards, self._sizes(), strict=True)
            ],
            dim=self.dim,
        )

    def _shard_shape(self, extent: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], extent, *self.shape[self.dim + 1 :])

    def _return(
        self, whole: Tensor | None, count: int
    ) -> tuple[dist.Work, Tensor, int]:
        """Start to send each rank its shard of this rank's orthogonalised matrix."""
        rank, size = self.group.rank(), self.group.size()
        own = self._numel(self._sizes()[rank])
        if whole is None:
            given, sends = (
                torch.empty(
                    0, dtype=self.iteration.dtype, device=self.iteration.device
                ),
                [0] * size,
            )
        else:
            given = torch.cat(
                [
                    shard.reshape(-1)
                    for shard in torch.split(whole, self._sizes(), dim=self.dim)
                ]
            )
            sends = [self._numel(extent) for extent in self._sizes()]
        taken = given.new_empty(own * count)
        receives = [own if peer < count else 0 for peer in range(size)]
        work = dist.all_to_all_single(
            taken, given, receives, sends, group=self.group, async_op=True
        )
        assert work is not None
        return work, taken, count

    def _returned(self, returning: tuple[dist.Work, Tensor, int]) -> list[Tensor]:
        """Return this rank's shards of a round's orthogonalised matrices."""
        work, taken, count = returning
        work.wait()
        shape = self._shard_shape(self._sizes()[self.group.rank()])
        return [shard.view(shape) for shard in taken.view(count, -1)]


def _gathered(
    like: DTensor, directions: Sequence[Tensor], iteration: _Iteration
) -> list[Tensor]:
    """Orthogonalise matrices sharded along several mesh axes: gather, compute each on one rank, share the results."""
    mesh, tensors = like.device_mesh, placements()
    where = mesh.get_coordinate()
    assert where is not None
    size, index = mesh.size(), 0
    for axis, coordinate in enumerate(where):
        index = index * mesh.size(axis) + coordinate
    found: list[Tensor] = []
    for start in range(0, len(directions), size):
        members = directions[start : start + size]
        wholes = [
            _whole_of(member.to(iteration.device, iteration.dtype), like)
            for member in members
        ]
        mine = (
            _whole(wholes[index][None], iteration)
            if index < len(members)
            else torch.zeros_like(wholes[0])[None]
        )
        for axis in reversed(range(mesh.ndim)):
            mine = _all_gathered(mine.contiguous(), mesh.get_group(axis))
        for whole in mine[: len(members)]:
            spread = tensors.distribute_tensor(
                whole.contiguous(), mesh, like.placements, src_data_rank=None
            )
            found.append(spread.to_local())
    return found


def _whole_of(local: Tensor, like: DTensor) -> Tensor:
    """Return the whole tensor of which every rank gives its shard, gathered along one mesh axis after the other."""
    tensors = placements()
    whole = tensors.DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    kinds = list(like.placements)
    axes = sorted(
        range(len(kinds)), key=lambda axis: (type(kinds[axis]) is tensors.Shard, -axis)
    )  # the inner cut first
    for axis in axes:
        kinds[axis] = tensors.Replicate()
        whole = whole.redistribute(placements=kinds)
    found: Tensor = whole.to_local()
    return found


def _all_gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return tensor
    made = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(made, tensor, group=group)
    return torch.cat(made)
