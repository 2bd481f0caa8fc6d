"""Optimizer of a DeepSpeed engine: reduces and clips gradients at the window's end, steps, and saves its state."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from hasten.checkpoint.base import Slice, local_data
from hasten.extensions.deepspeed.config import EngineConfig
from hasten.extensions.deepspeed.shards import (
    MASTER,
    EngineNorm,
    ZeroShard,
    gradients_of,
    rank_weights_of,
    shards_of,
)
from hasten.optim import clip
from hasten.optim.engine import (
    EngineOptimizer,
    list_groups_of_parameters,
    list_parameters,
    options_of,
    put_where_used,
    refuse_late_backward,
)
from hasten.precision.base import APPLIED, StepResult

log = logging.getLogger(__name__)

_SCALE_KEY: Final = "loss_scale"


class DeepSpeedOptimizer(EngineOptimizer):
    """Optimizer that steps an engine at the end of the loop's window.

    At every backward the engine is set to continue the window. Gradients are reduced to their final values once, at the first
    of these calls: clipping, a correction of the window's mean, or the step.
    """

    def __init__(
        self, engine: Any, groups: list[dict[str, Any]], engine_config: EngineConfig
    ) -> None:  # Any: DeepSpeed is untyped
        # Optimizer.__init__ is not called: the groups are the user's, and their options were checked before.
        self.engine = engine
        self.stage = engine_config.stage
        self.param_groups = groups
        self.state = defaultdict(dict)
        self.defaults = dict(engine.basic_optimizer.defaults)
        self.stale = False
        """Weights were loaded that the engine's persistent parameters do not have yet (ZeRO-3)."""
        self.entered = False
        """The running backward has reached this engine."""
        self.schedule: Any = None
        """Scheduler that the loop steps for this engine."""
        self._clipping = engine_config.clipping
        self._gradients_are_clipped = False
        self._gradients_are_final = False
        engine.set_gradient_accumulation_boundary(False)
        if self.stage == 0 and engine.optimizer is not engine.basic_optimizer:
            # DeepSpeed has stepped once with zeros, which would distort bias corrections
            engine.basic_optimizer.state.clear()
        self._norm = EngineNorm(engine.optimizer, self.stage) if self.stage else None
        self._count_passes()

    def __repr__(self) -> str:
        return (
            f"DeepSpeedOptimizer(stage={self.stage}, {self.engine.basic_optimizer!r})"
        )

    def _count_passes(self) -> None:
        engine_prologue: Callable[[], None] = self.engine._backward_prologue

        def count_and_call() -> None:
            if self.entered:  # a second output of this engine in the same loss
                return
            if self._gradients_are_final:
                refuse_late_backward()
            self.num_passes += 1
            self.entered = True
            engine_prologue()

        self.engine._backward_prologue = count_and_call

    # -- one update -----------------------------------------------------------------------------------------------
    @property
    def loss_scale(self) -> float:
        """Factor that losses are multiplied by."""
        return float(getattr(self.engine.optimizer, "loss_scale", 1.0))

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Context manager for the backward of a loss that may come from this engine and from others."""
        engine = self.engine
        optimizer = self.engine.optimizer
        clear_backward_flag = getattr(optimizer, "clear_backward_seen_flag", None)
        if callable(clear_backward_flag):
            clear_backward_flag()  # this may be the second backward after a forward
        self.entered = False
        engine._running_engine_backward = True
        try:
            yield
            if self.entered:
                engine._backward_epilogue()
        except BaseException:
            exit_backward = getattr(optimizer, "exit_backward", None)
            if self.entered and callable(exit_backward):
                exit_backward()
            raise
        finally:
            self.entered = engine._running_engine_backward = False

    def finalize(self) -> None:
        """Reduce the window's accumulated gradients to their final values, once. Ranks: every rank."""
        if self._gradients_are_final or not self.num_passes:
            return
        self.engine.set_gradient_accumulation_boundary(True)
        if self.stage < 2:
            self.engine.allreduce_gradients()
        else:
            self.engine.optimizer.finalize_gradient_accumulation_boundary()
        self._gradients_are_final = True

    def apply(self) -> StepResult:
        if not self.num_passes:  # like torch: no gradients, no update
            return APPLIED
        self.finalize()
        if self._clipping and not self._gradients_are_clipped:
            self.clip(self._clipping)
        self.give_options()
        previous_scale = self.loss_scale
        self.engine.step()
        self._opt_called = True  # set for torch's schedulers
        applied = bool(self.engine.was_step_applied())
        if not applied:
            log.warning(
                "DeepSpeed skipped an update because gradients were inf or nan; the loss scale went from %g to %g",
                previous_scale,
                self.loss_scale,
            )
        self._start_window()
        shown_scale = None
        if previous_scale != 1.0:
            shown_scale = previous_scale
        return StepResult(applied=applied, scale=shown_scale)

    def give_options(self) -> None:
        """Copy the options that schedulers and the script have set to the engine's groups. Local."""
        for loop_group, engine_group in self._paired_groups():
            engine_group.update(options_of(loop_group))

    def take_options(self) -> None:
        """Copy the options of the engine's groups, which the engine has created or loaded, to the loop's. Local."""
        for loop_group, engine_group in self._paired_groups():
            loop_group.update(options_of(engine_group))

    def _paired_groups(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        return zip(
            self.param_groups, self.engine.basic_optimizer.param_groups, strict=True
        )

    def clip(self, max_norm: float) -> Tensor:
        """Clip the window's gradients to a 2-norm and return the norm before clipping. Ranks: every rank."""
        self.finalize()
        self._gradients_are_clipped = True
        device = self.engine.device
        engine_optimizer = self.engine.optimizer
        if not self.num_passes:
            return torch.zeros((), device=device)
        rank_gradients = gradients_of(self.engine, self.stage)
        if self._norm is None:
            total_norm = _local_norm(rank_gradients)
        else:
            total_norm = self._norm.scaled_norm().to(device, torch.float32)
        total_norm = total_norm / self.loss_scale
        if max_norm == 0:
            self.multiply_gradients(0.0)
        elif hasattr(engine_optimizer, "clip_grad"):
            # applied in float32, together with the unscaling
            engine_optimizer.clip_grad = float(max_norm)
        else:
            clip.scale_down(rank_gradients, max_norm, total_norm)
        return total_norm

    def multiply_gradients(self, factor: float | Tensor) -> None:
        self.finalize()
        self._forget_norm()
        rank_gradients = (
            gradients_of(self.engine, self.stage) if self.num_passes else ()
        )
        with torch.no_grad():
            for gradient in rank_gradients:
                if isinstance(factor, Tensor):
                    gradient.mul_(factor.to(gradient.device))
                else:
                    gradient.mul_(factor)
        # offload computes norms while it copies gradients to the host
        copied_norms = getattr(self.engine.optimizer, "norm_for_param_grads", {})
        for parameter_id, copied_norm in copied_norms.items():
            copied_norms[parameter_id] = copied_norm * abs(factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients accumulated since the engine's last update."""
        if not self.num_passes:
            return
        optimizer = self.engine.optimizer
        optimizer.zero_grad()
        self.engine.zero_grad()
        if self.stage in (1, 2):
            optimizer.micro_step_id = -1
            optimizer._release_preflattened_grad_buffers()
            for buffer_index in list(optimizer.averaged_gradients):
                optimizer.averaged_gradients[buffer_index] = None
            for buffer_index in list(optimizer.all_grad_tensors):
                optimizer.all_grad_tensors[buffer_index] = None
            if optimizer.cpu_offload:
                optimizer.reset_cpu_buffers()
                optimizer._offload_accumulated_param_ids = set()
        elif self.stage == 3:
            optimizer.averaged_gradients = {}
            optimizer._offload_boundary_param_ids = set()
            if optimizer.offload_optimizer:
                optimizer.reset_cpu_buffers()
        self._start_window()

    def _forget_norm(self) -> None:
        if self._norm is not None:
            self._norm.forget_norm()

    def _start_window(self) -> None:
        """Start a new window."""
        self._forget_norm()
        self.num_passes = 0
        self._gradients_are_final = self._gradients_are_clipped = False
        optimizer = self.engine.optimizer
        if hasattr(optimizer, "clip_grad"):
            optimizer.clip_grad = 0.0
        gradient_buffer = getattr(optimizer, "grad_partitions_flat_buffer", None)
        if self.stage == 3 and gradient_buffer is not None:
            # otherwise a parameter unused in the next window would be updated by this window's gradient
            gradient_buffer.zero_()
        self.engine.set_gradient_accumulation_boundary(False)

    # -- state ----------------------------------------------------------------------------------------------------
    def _shard_of_parameter(self) -> dict[int, ZeroShard]:
        return {
            id(shard.parameter): shard for shard in shards_of(self.engine, self.stage)
        }

    def _shards_by_index(self) -> dict[int, ZeroShard]:
        """Return the shards by the index of their parameter in the groups."""
        shard_of_parameter = self._shard_of_parameter()
        parameters = list_parameters(self.param_groups)
        shards = {}
        for index, parameter in enumerate(parameters):
            if id(parameter) in shard_of_parameter:
                shards[index] = shard_of_parameter[id(parameter)]
        return shards

    def state_dict(self) -> dict[str, Any]:
        """Return the state by the index of the parameter: this rank's slices, whole tensors and scalars. Local."""
        inner_state = self.engine.basic_optimizer.state
        state: dict[int, dict[str, Any]] = {}
        for parameter_index, shard in self._shards_by_index().items():
            parameter_state: dict[str, Any] = {}
            if shard.has_master:
                parameter_state[MASTER] = shard.to_stored(shard.flat)
            for state_key, state_value in inner_state.get(shard.flat, {}).items():
                laid_out = (
                    isinstance(state_value, Tensor)
                    and state_value.shape == shard.flat.shape
                    and state_value.ndim > 0
                )
                if laid_out:
                    state_value = shard.to_stored(state_value)
                parameter_state[state_key] = state_value
            if parameter_state:
                state[parameter_index] = parameter_state
        loss_scaler = self._loss_scaler()
        scaler_state = {}
        if loss_scaler is not None:
            for scaler_field, scale_value in vars(loss_scaler).items():
                if type(scale_value) in (bool, int, float):
                    scaler_state[scaler_field] = scale_value
        return {
            "state": state,
            "param_groups": self.numbered_groups(),
            _SCALE_KEY: scaler_state,
        }

    def state_room(
        self, parameter: Tensor, key: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor | Slice:
        """Allocate memory for a stored tensor of a parameter: this rank's slice, or the whole tensor if it is not sharded."""
        shard = self._shard_of_parameter().get(id(parameter))
        if (
            shard is None
            or shape not in ((shard.total,), tuple(shard.flat.shape))
            or shape == ()
        ):
            return torch.empty(shape, dtype=dtype)
        return shard.allocate_slice(dtype)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict made of slices in this rank's layout. Local."""
        inner_state = self.engine.basic_optimizer.state
        group_of_parameter = list_groups_of_parameters(self.param_groups)
        shards_by_tensor: dict[Tensor, list[tuple[int, ZeroShard]]] = defaultdict(list)
        for parameter_index, shard in self._shards_by_index().items():
            shards_by_tensor[shard.flat].append((parameter_index, shard))
        for flat_tensor, shards in shards_by_tensor.items():
            inner_state.pop(flat_tensor, None)
            loaded_state: dict[str, Any] = {}
            for parameter_index, shard in shards:
                saved_state = dict(state_dict["state"].get(parameter_index, {}))
                master_weights = saved_state.pop(MASTER, None)
                if master_weights is not None and shard.has_master:
                    shard.slice_of(flat_tensor).copy_(local_data(master_weights))
                elif not shard.whole:
                    shard.slice_of(flat_tensor).copy_(self._model_weights_of(shard))
                for state_key, state_value in saved_state.items():
                    _store_loaded_value(
                        loaded_state,
                        state_key,
                        state_value,
                        shard,
                        group_of_parameter[parameter_index],
                    )
            if loaded_state:
                inner_state[flat_tensor] = loaded_state
        for param_group, saved_group in zip(
            self.param_groups, state_dict["param_groups"], strict=True
        ):
            param_group.update(options_of(saved_group))
        loss_scaler = self._loss_scaler()
        for state_key, state_value in state_dict.get(_SCALE_KEY, {}).items():
            if loss_scaler is not None:
                setattr(loss_scaler, state_key, state_value)
        if inner_state and hasattr(
            self.engine.optimizer, "_hp_optimizer_states_linked"
        ):
            # refresh the state that deepspeed.utils returns
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()
        self.stale = self.stage == 3

    def refresh(self) -> None:
        """Copy loaded weights to the parameters that ZeRO-3 holds whole or has not yet released. Ranks: every rank."""
        if not self.stale:
            return
        self.stale = False
        for parameter in self.engine.module.parameters():
            # gathered with the old weights for a step that did not happen
            if parameter.ds_status.name == "AVAILABLE":
                parameter.partition(has_been_updated=False)
        if resident_parameters := list(self.engine.optimizer.persistent_parameters):
            resident_parameters[0].all_gather(resident_parameters)

    def _model_weights_of(self, shard: ZeroShard) -> Tensor:
        """Return the slice of the model's weights that the shard updates."""
        if self.stage == 3:
            return rank_weights_of(shard.parameter)
        return shard.parameter.detach().reshape(-1).narrow(0, shard.offset, shard.size)

    def _loss_scaler(self) -> Any:
        optimizer = self.engine.optimizer
        return getattr(optimizer, "loss_scaler", None) or getattr(
            optimizer, "loss_scale_config", None
        )


def _local_norm(gradients: list[Tensor]) -> Tensor:
    gradient_norms = []
    for gradient in gradients:
        gradient_norms.append(
            torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)
        )
    total_norm: Tensor = torch.linalg.vector_norm(torch.stack(gradient_norms))
    return total_norm


def _store_loaded_value(
    tensor_state: dict[str, Any],
    state_key: str,
    loaded_value: Any,
    shard: ZeroShard,
    group: Mapping[str, Any],
) -> None:  # Any: arbitrarily nested state
    """Store one loaded value of a parameter in the state of the tensor that contains its shard."""
    if isinstance(loaded_value, Slice) or (
        shard.whole and isinstance(loaded_value, Tensor) and loaded_value.ndim
    ):
        if state_key not in tensor_state:
            tensor_state[state_key] = torch.zeros_like(
                shard.flat, dtype=local_data(loaded_value).dtype, requires_grad=False
            )
        shard.slice_of(tensor_state[state_key]).copy_(local_data(loaded_value))
    else:
        tensor_state[state_key] = put_where_used(
            state_key, loaded_value, group, shard.flat.device
        )
