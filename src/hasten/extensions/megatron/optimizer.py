"""Optimizer of a Megatron engine: reduces gradients once a window, clips, updates, and saves its state as shards."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.checkpoint.base import Slice, local_data
from hasten.errors import CheckpointError, PrepareError
from hasten.extensions.megatron.model import MegatronModel
from hasten.extensions.megatron.package import hushed, package, quiet
from hasten.extensions.megatron.weights import slice_of
from hasten.optim.engine import EngineOptimizer, put_where_used, refuse_late_backward
from hasten.precision.base import APPLIED, StepResult


@dataclass(frozen=True, slots=True)
class ShardPart:
    """A parameter and the tensor that the inner optimizer updates for it."""

    model: MegatronModel
    parameter: Tensor
    main: Tensor | None
    """The updated tensor; None if other data-parallel ranks update all of the parameter."""
    span: tuple[int, int] | None = None
    """Start and size of the shard in the flattened parameter; None if this rank updates all of it."""

    @property
    def has_master(self) -> bool:
        """True if the updated tensor is a float32 copy of 16-bit weights."""
        return self.parameter.dtype != torch.float32

    @property
    def weights(self) -> Tensor:
        """The model's weights that correspond to the updated tensor."""
        if self.span is None:
            return self.parameter.detach()
        return self.parameter.detach().view(-1).narrow(0, *self.span)

    def laid_out(self, value: Any) -> bool:  # Any: a value of an optimizer's state
        """Return whether a state value is a tensor with the shape of the updated tensor."""
        return (
            isinstance(value, Tensor)
            and self.main is not None
            and value.ndim > 0
            and tuple(value.shape) == tuple(self.main.shape)
        )

    def stored(self, value: Tensor) -> Slice:
        """Return a tensor with the layout of the updated one, as checkpoints store it."""
        if self.span is None:
            return slice_of(value, self.model.place_of(self.parameter), self.model.owns(self.parameter))
        index, shards = self._tensor_shard()
        start, size = self.span
        owned = size > 0 and (shards > 1 or self.model.ranks.tp[0] == 0)
        return Slice(value.detach().view(1, -1), (shards, self.parameter.numel()), (index, start), owned=owned)

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | Slice:
        """Allocate memory for a stored tensor of the parameter: this rank's slice, or the whole of one with another layout."""
        if self.span is None:
            at = self.model.place_of(self.parameter)
            if shape == () or shape != at.shape:
                return torch.empty(shape, dtype=dtype)
            return slice_of(torch.zeros_like(self.parameter, dtype=dtype, requires_grad=False), at, True)
        index, shards = self._tensor_shard()
        if shape != (shards, self.parameter.numel()):
            return torch.empty(shape, dtype=dtype)
        start, size = self.span
        return Slice(torch.zeros(1, size, dtype=dtype, device=self.parameter.device), shape, (index, start))

    def inside(self, tensor: Tensor) -> Tensor:
        """Return the elements that checkpoints store, of a tensor with the layout of the updated one."""
        return self.stored(tensor).data

    def _tensor_shard(self) -> tuple[int, int]:
        """Return the index and the number of distinct tensor-parallel shards of the parameter."""
        return self.model.ranks.tp if self.model.split(self.parameter) else (0, 1)


def clip_with_experts(parts: Sequence[ShardPart], max_norm: float) -> Tensor:
    """Clip all gradients to `max_norm` unless it is 0, and return their norm before clipping. Ranks: every rank.

    Experts are on other ranks than the other parameters, so each kind is summed over its ranks.
    """
    state = package("parallel_state")
    mains = [(part, part.main) for part in parts if part.main is not None and part.main.grad is not None]
    total = torch.zeros((), device=mains[0][1].device)
    for experts, group in (
        (False, state.get_model_parallel_group()),
        (True, state.get_expert_tensor_model_pipeline_parallel_group()),
    ):
        own = torch.zeros_like(total)
        for part, main in mains:
            copied = getattr(part.parameter, "shared", False)  # the last stage's copy of tied embeddings
            if part.model.is_expert(part.parameter) is experts and part.model.counts(part.parameter) and not copied:
                assert main.grad is not None
                own += main.grad.float().square().sum()
        dist.all_reduce(own, group=group)
        total += own
    norm = total.sqrt()
    if max_norm > 0:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for _, main in mains:
            assert main.grad is not None
            main.grad.mul_(factor)
    return norm


def parts_of(model: MegatronModel, parameters: Sequence[Tensor], inner: Any, shared: bool) -> Iterator[ShardPart]:
    """Yield the tensor that `inner`, megatron-core's optimizer, updates for each parameter.

    With `shared`, data-parallel ranks each update a shard.
    """
    if not shared:
        for parameter in parameters:
            main = parameter if parameter.dtype == torch.float32 else getattr(parameter, "main_param")  # noqa: B009
            yield ShardPart(model, parameter, main)
        return
    mains: dict[int, Tensor] = {}
    for models, shards in (
        (inner.model_float16_groups, inner.shard_fp32_from_float16_groups),
        (inner.model_fp32_groups, inner.shard_fp32_groups),
    ):
        for group, theirs in zip(models, shards, strict=True):
            mains |= {id(parameter): shard for parameter, shard in zip(group, theirs, strict=True)}
    for parameter in parameters:
        main = mains.get(id(parameter))
        span = (0, 0)
        if main is not None:
            found = inner._get_model_param_range_map(parameter)["param"]
            span = found.start, found.size
        yield ShardPart(model, parameter, main, span)


log = logging.getLogger(__name__)

MASTER: Final = "master"
"""Key of the float32 weights in the optimizer's state."""
_DROPOUT: Final = "dropout"
_SHARED: Final = "shared_over_data"


class MegatronOptimizer(EngineOptimizer):
    """Optimizer that steps an engine at the end of the loop's window; its groups hold this rank's parameters."""

    def __init__(
        self,
        model: MegatronModel,
        given: torch.optim.Optimizer,
        clipping: float | None,
        seed: int,
        shared: bool = False,
    ) -> None:
        # Optimizer.__init__ is not called: the groups are the user's, and their options were checked before.
        self.model = model
        self.param_groups = [{**group, "params": list(group["params"])} for group in given.param_groups]
        self.state = defaultdict(dict)
        self.defaults = dict(given.defaults)
        self.draws = [seed, 0]
        """Source of dropout's random numbers: the run's seed and the number of batches so far."""
        self._clipping = clipping
        self._told = self._final = self._clipped = self._overflow = False
        self._shared = shared
        """Data-parallel ranks each hold and update a shard of master weights and moments."""
        self.inner = _wrapped(given, model, shared)

    def __repr__(self) -> str:
        return f"MegatronOptimizer({self.inner.optimizer!r})"

    # -- one update -----------------------------------------------------------------------------------------------
    def passed(self) -> None:
        """Count a backward that is about to reach this engine.

        Raises: StepError if the window's gradients were already reduced.
        """
        if self._final:
            refuse_late_backward()
        self.num_passes += 1

    def finalize(self) -> None:
        """Reduce the window's gradients over data-parallel ranks and stages, once. Ranks: every rank."""
        if self._final or not self.num_passes:
            return
        with hushed():
            package("distributed").finalize_model_grads([self.model.engine])
        self._final = True

    def _ready(self) -> None:
        """Pass the gradients to the inner optimizer, unless clipping has done so."""
        self.finalize()
        if not self._clipped:
            with hushed():
                self._overflow = bool(self.inner.prepare_grads())

    def clip(self, max_norm: float) -> Tensor:
        """Clip the window's gradients to a norm and return the norm before clipping. Ranks: every rank."""
        device = next(iter(self.model.held.values())).device
        if not self.num_passes:
            return torch.zeros((), device=device)
        if self._clipping and max_norm != self._clipping and not self._told:
            self._told = True
            log.info("the loop clips to %g; gradient_clipping=%g of Megatron is not used", max_norm, self._clipping)
        self._ready()
        self._clipped = True
        with hushed():
            if self.model.facts.experts is not None:
                norm = clip_with_experts(self._parts(), max_norm)
            else:
                norm = self.inner.get_grad_norm() if max_norm == 0 else self.inner.clip_grad_norm(max_norm)
        if max_norm == 0:
            self.model.engine.scale_gradients(0.0)
        return torch.as_tensor(norm, device=device)

    def multiply_gradients(self, factor: float | Tensor) -> None:
        self.finalize()
        if self.num_passes:
            self.model.engine.scale_gradients(factor)

    def apply(self) -> StepResult:
        if not self.num_passes:  # like torch: no gradients, no update
            return APPLIED
        if self._clipping and not self._clipped:
            self.clip(self._clipping)
        self._ready()
        for own, inner in zip(self.param_groups, self.inner.optimizer.param_groups, strict=True):
            inner.update({key: value for key, value in own.items() if key != "params"})
        with hushed():
            applied = not self._overflow and bool(self.inner.step_with_ready_grads())
        self._opt_called = True  # set for torch's schedulers
        self._clear()
        return StepResult(applied=applied)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients accumulated since the engine's last update."""
        if self.num_passes:
            self._clear()

    def _clear(self) -> None:
        self.num_passes = 0
        self._final = self._clipped = self._overflow = False
        self.inner.zero_grad(True)
        self.model.engine.zero_grad_buffer()

    # -- state ----------------------------------------------------------------------------------------------------
    def _parts(self) -> list[ShardPart]:
        params = [p for group in self.param_groups for p in group["params"]]
        return list(parts_of(self.model, params, self.inner, self._shared))

    def state_dict(self) -> dict[str, Any]:
        """Return the state by the index of the parameter: this rank's slices, whole tensors and scalars. Local."""
        parts, inner = self._parts(), self.inner.optimizer.state
        known: dict[str, Any] = next(
            (inner[part.main] for part in parts if part.main is not None and inner.get(part.main)), {}
        )
        state: dict[int, dict[str, Any]] = {}
        for number, part in enumerate(parts):
            if part.main is None:
                values = _nothing(part, known)
            else:
                values = {MASTER: part.stored(part.main)} if part.has_master else {}
                for key, value in inner.get(part.main, {}).items():
                    values[key] = part.stored(value) if part.laid_out(value) else value
            if values:
                state[number] = values
        return {
            "state": state,
            "param_groups": self.numbered_groups(),
            _DROPOUT: list(self.draws),
            _SHARED: self._shared,
        }

    def state_room(self, parameter: Tensor, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | Slice:
        """Allocate memory for a stored tensor of a parameter: this rank's slice of it."""
        (part,) = parts_of(self.model, [parameter], self.inner, self._shared)
        room = part.room(shape, dtype)
        if self._shared and shape and isinstance(room, Tensor):
            raise CheckpointError(
                f"{key} of a parameter was stored with shape {shape}, but this run splits the optimizer state "
                f"(megatron.use_distributed_optimizer) from {tuple(parameter.shape)} on each tensor parallel rank, which does not "
                "support another tp_degree. Load with the tp_degree of the saved run."
            )
        return room

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict made of slices in this rank's layout. Local."""
        inner = self.inner.optimizer.state
        if bool(state_dict.get(_SHARED, False)) != self._shared:
            raise CheckpointError(
                f"the optimizer state was saved with megatron.use_distributed_optimizer={not self._shared}, and this run has "
                f"{self._shared}; the layouts of the state differ. Load with the setting of the saved run."
            )
        for own, kept in zip(self.param_groups, state_dict["param_groups"], strict=True):
            own.update({key: value for key, value in kept.items() if key != "params"})
        groups = [group for group in self.param_groups for _ in group["params"]]
        for number, part in enumerate(self._parts()):
            if part.main is None:
                continue
            saved = dict(state_dict["state"].get(number, {}))
            master = saved.pop(MASTER, None)
            if part.has_master:
                part.main.copy_(part.weights)
                if master is not None:
                    part.inside(part.main).copy_(local_data(master))
            inner.pop(part.main, None)
            if saved:
                inner[part.main] = {key: _fresh(part, key, value, groups[number]) for key, value in saved.items()}
        self.draws = [int(number) for number in state_dict.get(_DROPOUT, self.draws)]

    def reload(self) -> None:
        """Copy the model's weights to the master weights. Local."""
        self.inner.reload_model_params()


def _wrapped(given: torch.optim.Optimizer, model: MegatronModel, shared: bool) -> Any:  # Any: megatron-core is untyped
    """Wrap the user's optimizer in megatron-core's optimizer."""
    half = bool(model.built.config.bf16)
    with quiet():
        config = package("optimizer").OptimizerConfig(
            bf16=half,
            params_dtype=torch.bfloat16 if half else torch.float32,
            clip_grad=0.0,
            use_distributed_optimizer=shared,
        )
        kinds = package("optimizer.optimizer")
        if shared:
            return _sharing(given, config, model)
        if half:
            return kinds.Float16OptimizerWithFloat16Params(given, config, None, None)
        return kinds.FP32Optimizer(given, config, None)


def _sharing(given: torch.optim.Optimizer, config: Any, model: MegatronModel) -> Any:  # Any: megatron-core is untyped
    """Wrap the user's optimizer in megatron-core's distributed one. Raises: PrepareError for an unsupported class."""
    state = package("parallel_state")
    kind: Any = package("optimizer.distrib_optimizer").DistributedOptimizer
    if type(given) not in (torch.optim.Adam, torch.optim.AdamW):
        raise PrepareError(
            f"megatron.use_distributed_optimizer=True is not supported with {type(given).__name__}, because megatron-core only "
            "distributes the state of Adam and AdamW; use torch.optim.AdamW, or remove the setting."
        )
    made = kind(
        given,
        config,
        None,
        None,
        model_chunks=[model.engine],
        per_model_buffers={0: model.engine.buffers},
        data_parallel_group=state.get_data_parallel_group(with_context_parallel=True),
        data_parallel_group_gloo=None,
        data_parallel_group_idx=0,
        distributed_optimizer_instance_id=0,
    )
    made.grad_stats_parallel_group = state.get_intra_distributed_optimizer_instance_group()
    return made


def _nothing(part: ShardPart, known: Mapping[str, Any]) -> dict[str, Any]:  # Any: arbitrarily nested state
    """Return the state of a parameter that other data-parallel ranks update: the keys of the others, with empty slices."""
    values: dict[str, Any] = {
        key: value for key, value in known.items() if not isinstance(value, Tensor) or not value.ndim
    }
    device = part.parameter.device
    if part.has_master:
        values[MASTER] = part.stored(torch.empty(0, device=device))
    values |= {
        key: part.stored(torch.empty(0, dtype=value.dtype, device=device))
        for key, value in known.items()
        if isinstance(value, Tensor) and value.ndim
    }
    return values


def _fresh(part: ShardPart, key: str, value: Any, group: Mapping[str, Any]) -> Any:  # Any: arbitrarily nested state
    """Return a stored value in the form of the inner optimizer's state."""
    if not isinstance(value, Slice) or part.main is None:
        return put_where_used(key, value, group, part.parameter.device)
    room = torch.zeros_like(part.main, dtype=value.data.dtype, requires_grad=False)
    part.inside(room).copy_(value.data)
    return room


def _copied(tree: Any) -> Any:  # Any: an optimizer's state dict
    if isinstance(tree, Slice):
        return Slice(tree.data.clone(), tree.shape, tree.offset, tree.owned)
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list) else tree
