"""Optimizer of a Megatron engine: reduces gradients once a window, clips, updates, and saves its state as shards."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from hasten.checkpoint.base import Slice, local_data
from hasten.errors import CheckpointError, PrepareError
from hasten.optim.engine import EngineOptimizer, put_where_used, refuse_late_backward
from hasten.precision.base import APPLIED, StepResult
from hasten.strategies.engines.megatron.model import MegatronModel
from hasten.strategies.engines.megatron.package import hushed, package, quiet
from hasten.strategies.engines.megatron.shards import ShardPart, clip_with_experts, parts_of

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

    def keeping(self) -> Callable[[], None]:
        """Return a function that restores the current state, for use after a failed load. Local."""
        before = _copied(self.state_dict())
        return lambda: self.load_state_dict(before)

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
