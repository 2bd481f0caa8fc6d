"""Optimizer of a Megatron engine: reduces gradients once a window, clips, updates, and saves its state as shards."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hasten.checkpoint.base import Slice, local_data
from hasten.errors import CheckpointError, PrepareError
from hasten.extensions.megatron.model import MegatronModel
from hasten.extensions.megatron.package import (
    hide_engine_warnings,
    hide_warnings,
    import_megatron,
)
from hasten.extensions.megatron.weights import slice_of
from hasten.optim.engine import (
    EngineOptimizer,
    list_groups_of_parameters,
    list_parameters,
    options_of,
    put_where_used,
    refuse_late_backward,
)
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

    def to_stored(self, value: Tensor) -> Slice:
        """Return a tensor with the layout of the updated one, as checkpoints store it."""
        if self.span is None:
            return slice_of(
                value,
                self.model.place_of(self.parameter),
                self.model.writes_shard(self.parameter),
            )
        index, shards = self._tensor_shard()
        start, size = self.span
        is_owned = size > 0 and (shards > 1 or self.model.ranks.tp[0] == 0)
        return Slice(
            value.detach().view(1, -1),
            (shards, self.parameter.numel()),
            (index, start),
            owned=is_owned,
        )

    def allocate_stored(
        self, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor | Slice:
        """Allocate memory for a stored tensor of the parameter: this rank's slice, or the whole of one with another layout."""
        if self.span is None:
            location = self.model.place_of(self.parameter)
            if shape == () or shape != location.shape:
                return torch.empty(shape, dtype=dtype)
            return slice_of(
                torch.zeros_like(self.parameter, dtype=dtype, requires_grad=False),
                location,
                True,
            )
        index, shards = self._tensor_shard()
        if shape != (shards, self.parameter.numel()):
            return torch.empty(shape, dtype=dtype)
        start, size = self.span
        return Slice(
            torch.zeros(1, size, dtype=dtype, device=self.parameter.device),
            shape,
            (index, start),
        )

    def stored_elements(self, tensor: Tensor) -> Tensor:
        """Return the elements that checkpoints store, of a tensor with the layout of the updated one."""
        return self.to_stored(tensor).data

    def _tensor_shard(self) -> tuple[int, int]:
        """Return the index and the number of distinct tensor-parallel shards of the parameter."""
        return self.model.ranks.tp if self.model.is_split(self.parameter) else (0, 1)


def parts_of(
    model: MegatronModel,
    parameters: Sequence[Tensor],
    inner_optimizer: Any,
    shares_state: bool,
) -> Iterator[ShardPart]:
    """Yield the tensor that `inner`, megatron-core's optimizer, updates for each parameter.

    With `shared`, data-parallel ranks each update a shard.
    """
    if not shares_state:
        for parameter in parameters:
            if parameter.dtype == torch.float32:
                main_tensor = parameter
            else:
                main_tensor = getattr(parameter, "main_param")  # noqa: B009
            yield ShardPart(model, parameter, main_tensor)
        return
    main_tensors: dict[int, Tensor] = {}
    for models, shards in (
        (
            inner_optimizer.model_float16_groups,
            inner_optimizer.shard_fp32_from_float16_groups,
        ),
        (inner_optimizer.model_fp32_groups, inner_optimizer.shard_fp32_groups),
    ):
        for group, group_shards in zip(models, shards, strict=True):
            main_tensors.update(zip(map(id, group), group_shards, strict=True))
    for parameter in parameters:
        main_shard = main_tensors.get(id(parameter))
        span = (0, 0)
        if main_shard is not None:
            value_range = inner_optimizer._get_model_param_range_map(parameter)["param"]
            span = value_range.start, value_range.size
        yield ShardPart(model, parameter, main_shard, span)


log = logging.getLogger(__name__)

MASTER: Final = "master"
"""Key of the float32 weights in the optimizer's state."""
_DROPOUT_KEY: Final = "dropout"
_SHARED_KEY: Final = "shared_over_data"


class MegatronOptimizer(EngineOptimizer):
    """Optimizer that steps an engine at the end of the loop's window; its groups hold this rank's parameters."""

    def __init__(
        self,
        model: MegatronModel,
        user_optimizer: torch.optim.Optimizer,
        clipping: float | None,
        seed: int,
        shares_state: bool = False,
    ) -> None:
        # Optimizer.__init__ is not called: the groups are the user's, and their options were checked before.
        self.model = model
        self.param_groups = [
            {**group, "params": list(group["params"])}
            for group in user_optimizer.param_groups
        ]
        self.state = defaultdict(dict)
        self.defaults = dict(user_optimizer.defaults)
        self.draws = [seed, 0]
        """Source of dropout's random numbers: the run's seed and the number of batches so far."""
        self._clipping = clipping
        self._has_logged_clipping = self._gradients_are_final = (
            self._gradients_are_clipped
        ) = self._has_overflow = False
        self._shares_state = shares_state
        """Data-parallel ranks each hold and update a shard of master weights and moments."""
        self.inner = _wrap_optimizer(user_optimizer, model, shares_state)

    def __repr__(self) -> str:
        return f"MegatronOptimizer({self.inner.optimizer!r})"

    # -- one update -----------------------------------------------------------------------------------------------
    def count_pass(self) -> None:
        """Count a backward that is about to reach this engine.

        Raises: StepError if the window's gradients were already reduced.
        """
        if self._gradients_are_final:
            refuse_late_backward()
        self.num_passes += 1

    def finalize(self) -> None:
        """Reduce the window's gradients over data-parallel ranks and stages, once. Ranks: every rank."""
        if self._gradients_are_final or not self.num_passes:
            return
        with hide_engine_warnings():
            import_megatron("distributed").finalize_model_grads([self.model.engine])
        self._gradients_are_final = True

    def _prepare_gradients(self) -> None:
        """Pass the gradients to the inner optimizer, unless clipping has done so."""
        self.finalize()
        if not self._gradients_are_clipped:
            with hide_engine_warnings():
                self._has_overflow = bool(self.inner.prepare_grads())

    def clip(self, max_norm: float) -> Tensor:
        """Clip the window's gradients to a norm and return the norm before clipping. Ranks: every rank."""
        device = next(iter(self.model.held.values())).device
        if not self.num_passes:
            return torch.zeros((), device=device)
        if (
            self._clipping
            and max_norm != self._clipping
            and not self._has_logged_clipping
        ):
            self._has_logged_clipping = True
            log.info(
                "the loop clips to %g; gradient_clipping=%g of Megatron is not used",
                max_norm,
                self._clipping,
            )
        self._prepare_gradients()
        self._gradients_are_clipped = True
        with hide_engine_warnings():
            if max_norm == 0:
                total_norm = self.inner.get_grad_norm()
            else:
                total_norm = self.inner.clip_grad_norm(max_norm)
        if max_norm == 0:
            self.model.engine.scale_gradients(0.0)
        return torch.as_tensor(total_norm, device=device)

    def multiply_gradients(self, factor: float | Tensor) -> None:
        self.finalize()
        if self.num_passes:
            self.model.engine.scale_gradients(factor)

    def apply(self) -> StepResult:
        if not self.num_passes:  # like torch: no gradients, no update
            return APPLIED
        if self._clipping and not self._gradients_are_clipped:
            self.clip(self._clipping)
        self._prepare_gradients()
        for param_group, inner_group in zip(
            self.param_groups, self.inner.optimizer.param_groups, strict=True
        ):
            inner_group.update(options_of(param_group))
        with hide_engine_warnings():
            applied = not self._has_overflow and bool(
                self.inner.step_with_ready_grads()
            )
        self._opt_called = True  # set for torch's schedulers
        self._clear_gradients()
        return StepResult(applied=applied)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients accumulated since the engine's last update."""
        if self.num_passes:
            self._clear_gradients()

    def _clear_gradients(self) -> None:
        self.num_passes = 0
        self._gradients_are_final = self._gradients_are_clipped = self._has_overflow = (
            False
        )
        self.inner.zero_grad(True)
        self.model.engine.zero_grad_buffer()

    # -- state ----------------------------------------------------------------------------------------------------
    def _shard_parts(self) -> list[ShardPart]:
        parameters = list_parameters(self.param_groups)
        return list(parts_of(self.model, parameters, self.inner, self._shares_state))

    def state_dict(self) -> dict[str, Any]:
        """Return the state by the index of the parameter: this rank's slices, whole tensors and scalars. Local."""
        shard_parts = self._shard_parts()
        inner_state = self.inner.optimizer.state
        sample_state: dict[str, Any] = next(
            (
                inner_state[shard_part.main]
                for shard_part in shard_parts
                if shard_part.main is not None and inner_state.get(shard_part.main)
            ),
            {},
        )
        state: dict[int, dict[str, Any]] = {}
        for parameter_index, shard_part in enumerate(shard_parts):
            if shard_part.main is None:
                parameter_state = _state_on_other_ranks(shard_part, sample_state)
            else:
                if shard_part.has_master:
                    parameter_state = {MASTER: shard_part.to_stored(shard_part.main)}
                else:
                    parameter_state = {}
                for state_key, state_value in inner_state.get(
                    shard_part.main, {}
                ).items():
                    if shard_part.laid_out(state_value):
                        state_value = shard_part.to_stored(state_value)
                    parameter_state[state_key] = state_value
            if parameter_state:
                state[parameter_index] = parameter_state
        return {
            "state": state,
            "param_groups": self.numbered_groups(),
            _DROPOUT_KEY: list(self.draws),
            _SHARED_KEY: self._shares_state,
        }

    def state_room(
        self, parameter: Tensor, key: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor | Slice:
        """Allocate memory for a stored tensor of a parameter: this rank's slice of it."""
        (shard_part,) = parts_of(
            self.model, [parameter], self.inner, self._shares_state
        )
        allocated = shard_part.allocate_stored(shape, dtype)
        if self._shares_state and shape and isinstance(allocated, Tensor):
            raise CheckpointError(
                f"{key} of a parameter was stored with shape {shape}, but this run splits the optimizer state "
                f"(megatron.use_distributed_optimizer) from {tuple(parameter.shape)} on each tensor parallel rank, which does not "
                "support another tp_degree. Load with the tp_degree of the saved run."
            )
        return allocated

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict made of slices in this rank's layout. Local."""
        inner_state = self.inner.optimizer.state
        if bool(state_dict.get(_SHARED_KEY, False)) != self._shares_state:
            raise CheckpointError(
                f"the optimizer state was saved with megatron.use_distributed_optimizer={not self._shares_state}, and this run has "
                f"{self._shares_state}; the layouts of the state differ. Load with the setting of the saved run."
            )
        for param_group, saved_group in zip(
            self.param_groups, state_dict["param_groups"], strict=True
        ):
            param_group.update(options_of(saved_group))
        group_of_parameter = list_groups_of_parameters(self.param_groups)
        for parameter_index, shard_part in enumerate(self._shard_parts()):
            if shard_part.main is None:
                continue
            saved_state = dict(state_dict["state"].get(parameter_index, {}))
            master_weights = saved_state.pop(MASTER, None)
            if shard_part.has_master:
                shard_part.main.copy_(shard_part.weights)
                if master_weights is not None:
                    shard_part.stored_elements(shard_part.main).copy_(
                        local_data(master_weights)
                    )
            inner_state.pop(shard_part.main, None)
            if saved_state:
                inner_values = {}
                for option, option_value in saved_state.items():
                    inner_values[option] = _to_inner_state(
                        shard_part,
                        option,
                        option_value,
                        group_of_parameter[parameter_index],
                    )
                inner_state[shard_part.main] = inner_values
        self.draws = list(map(int, state_dict.get(_DROPOUT_KEY, self.draws)))

    def reload_masters(self) -> None:
        """Copy the model's weights to the master weights. Local."""
        self.inner.reload_model_params()


def _wrap_optimizer(
    user_optimizer: torch.optim.Optimizer, model: MegatronModel, shares_state: bool
) -> Any:  # Any: megatron-core is untyped
    """Wrap the user's optimizer in megatron-core's optimizer."""
    is_bf16 = bool(model.built.config.bf16)
    with hide_warnings():
        optimizer_config = import_megatron("optimizer").OptimizerConfig(
            bf16=is_bf16,
            params_dtype=torch.bfloat16 if is_bf16 else torch.float32,
            clip_grad=0.0,
            use_distributed_optimizer=shares_state,
        )
        optimizer_classes = import_megatron("optimizer.optimizer")
        if shares_state:
            return _wrap_in_distributed_optimizer(
                user_optimizer, optimizer_config, model
            )
        if is_bf16:
            return optimizer_classes.Float16OptimizerWithFloat16Params(
                user_optimizer, optimizer_config, None, None
            )
        return optimizer_classes.FP32Optimizer(user_optimizer, optimizer_config, None)


def _wrap_in_distributed_optimizer(
    user_optimizer: torch.optim.Optimizer, config: Any, model: MegatronModel
) -> Any:  # Any: megatron-core is untyped
    """Wrap the user's optimizer in megatron-core's distributed one. Raises: PrepareError for an unsupported class."""
    parallel_state = import_megatron("parallel_state")
    optimizer_class: Any = import_megatron(
        "optimizer.distrib_optimizer"
    ).DistributedOptimizer
    if type(user_optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise PrepareError(
            f"megatron.use_distributed_optimizer=True is not supported with {type(user_optimizer).__name__}, because megatron-core only "
            "distributes the state of Adam and AdamW; use torch.optim.AdamW, or remove the setting."
        )
    distributed_optimizer = optimizer_class(
        user_optimizer,
        config,
        None,
        None,
        model_chunks=[model.engine],
        per_model_buffers={0: model.engine.buffers},
        data_parallel_group=parallel_state.get_data_parallel_group(
            with_context_parallel=True  # the group of the gradient buffers
        ),
        data_parallel_group_gloo=None,
        data_parallel_group_idx=0,
        distributed_optimizer_instance_id=0,
    )
    distributed_optimizer.grad_stats_parallel_group = (
        parallel_state.get_intra_distributed_optimizer_instance_group()
    )
    return distributed_optimizer


def _state_on_other_ranks(
    shard_part: ShardPart, sample_state: Mapping[str, Any]
) -> dict[str, Any]:  # Any: arbitrarily nested state
    """Return the state of a parameter that other data-parallel ranks update: the keys of the others, with empty slices."""
    empty_state: dict[str, Any] = {}
    device = shard_part.parameter.device
    if shard_part.has_master:
        empty_state[MASTER] = shard_part.to_stored(torch.empty(0, device=device))
    for state_key, state_value in sample_state.items():
        if isinstance(state_value, Tensor) and state_value.ndim:
            empty_tensor = torch.empty(0, dtype=state_value.dtype, device=device)
            state_value = shard_part.to_stored(empty_tensor)
        empty_state[state_key] = state_value
    return empty_state


def _to_inner_state(
    shard_part: ShardPart, state_key: str, stored_value: Any, group: Mapping[str, Any]
) -> Any:  # Any: arbitrarily nested state
    """Return a stored value in the form of the inner optimizer's state."""
    if not isinstance(stored_value, Slice) or shard_part.main is None:
        return put_where_used(
            state_key, stored_value, group, shard_part.parameter.device
        )
    state_tensor = torch.zeros_like(
        shard_part.main, dtype=stored_value.data.dtype, requires_grad=False
    )
    shard_part.stored_elements(state_tensor).copy_(stored_value.data)
    return state_tensor
