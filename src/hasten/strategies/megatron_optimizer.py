"""The optimizer of a Megatron engine: it reduces gradients once a window, clips, updates, and keeps its state in parts."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from hasten.checkpoint.base import Slice, local_data
from hasten.optim.engine import EngineOptimizer, refuse_late_backward
from hasten.precision.base import APPLIED, StepResult
from hasten.strategies import megatron_engine
from hasten.strategies.megatron_model import MegatronModel
from hasten.strategies.megatron_weights import slice_of

log = logging.getLogger(__name__)

MASTER: Final = "master"
"""The key of the float32 weights beside those of an optimizer's own state."""
_DROPOUT: Final = "dropout"


class MegatronOptimizer(EngineOptimizer):
    """Steps an engine when the loop's window ends; its groups hold this rank's parameters of the model."""

    def __init__(self, model: MegatronModel, given: torch.optim.Optimizer, clipping: float | None, seed: int) -> None:
        # Optimizer.__init__ is not called: the groups are the user's, with options that were checked already.
        self.model = model
        self.param_groups = [{**group, "params": list(group["params"])} for group in given.param_groups]
        self.state = defaultdict(dict)
        self.defaults = dict(given.defaults)
        self.draws = [seed, 0]
        """What dropout is drawn from: the run's seed, and the number of batches so far."""
        self._clipping = clipping
        self._told = self._final = self._clipped = self._overflow = False
        self.inner = _wrapped(given, model.built.config.bf16)

    def __repr__(self) -> str:
        return f"MegatronOptimizer({self.inner.optimizer!r})"

    # -- one update -----------------------------------------------------------------------------------------------
    def passed(self) -> None:
        """Note that a backward is about to reach this engine.

        Raises: StepError when the window's gradients were reduced already.
        """
        if self._final:
            refuse_late_backward()
        self.num_passes += 1

    def finalize(self) -> None:
        """Reduce what the window has gathered over data parallel ranks and stages, once. Ranks: every rank."""
        if self._final or not self.num_passes:
            return
        with megatron_engine.hushed():
            megatron_engine.package("distributed").finalize_model_grads([self.model.engine])
        self._final = True

    def _ready(self) -> None:
        """Hand the gradients to the inner optimizer, which must not be done twice."""
        self.finalize()
        if not self._clipped:
            self._overflow = bool(self.inner.prepare_grads())

    def clip(self, max_norm: float) -> Tensor:
        """Clip the window's gradients to a norm; the norm they had. Ranks: every rank."""
        device = next(iter(self.model.held.values())).device
        if not self.num_passes:
            return torch.zeros((), device=device)
        if self._clipping and max_norm != self._clipping and not self._told:
            self._told = True
            log.info("the loop clips to %g; gradient_clipping=%g of Megatron is not used", max_norm, self._clipping)
        self._ready()
        self._clipped = True
        norm = self.inner.get_grad_norm() if max_norm == 0 else self.inner.clip_grad_norm(max_norm)
        if max_norm == 0:
            self.model.engine.scale_gradients(0.0)
        return torch.as_tensor(norm, device=device)

    def multiply_gradients(self, factor: float | Tensor) -> None:
        self.finalize()
        if self.num_passes:
            self.model.engine.scale_gradients(factor)

    def apply(self) -> StepResult:
        if not self.num_passes:  # as torch: without gradients nothing is updated
            return APPLIED
        if self._clipping and not self._clipped:
            self.clip(self._clipping)
        self._ready()
        for own, inner in zip(self.param_groups, self.inner.optimizer.param_groups, strict=True):
            inner.update({key: value for key, value in own.items() if key != "params"})
        applied = not self._overflow and bool(self.inner.step_with_ready_grads())
        self._opt_called = True  # what torch's schedulers look for
        self._clear()
        return StepResult(applied=applied)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what the engine has gathered since its last update."""
        if self.num_passes:
            self._clear()

    def _clear(self) -> None:
        self.num_passes = 0
        self._final = self._clipped = self._overflow = False
        self.inner.zero_grad(True)
        self.model.engine.zero_grad_buffer()

    # -- state ----------------------------------------------------------------------------------------------------
    def _numbered(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter with the tensor that the inner optimizer updates for it."""
        params = [p for group in self.param_groups for p in group["params"]]
        return [(p, getattr(p, "main_param", None) if p.dtype != torch.float32 else p) for p in params]  # type: ignore[misc]

    def _stored(self, parameter: Tensor, value: Any) -> Any:  # Any: state is nested freely
        if not isinstance(value, Tensor) or value.shape != parameter.shape or not value.ndim:
            return value
        return slice_of(value, self.model.place_of(parameter), self.model.owns(parameter))

    def state_dict(self) -> dict[str, Any]:
        """The state by the number of the parameter: slices of this rank, whole tensors and numbers. Local."""
        state: dict[int, dict[str, Any]] = {}
        for number, (parameter, main) in enumerate(self._numbered()):
            values = {} if main is parameter else {MASTER: self._stored(parameter, main)}
            values |= {k: self._stored(parameter, v) for k, v in self.inner.optimizer.state.get(main, {}).items()}
            if values:
                state[number] = values
        groups, count = [], 0
        for group in self.param_groups:
            size = len(group["params"])
            groups.append({**group, "params": list(range(count, count + size))})
            count += size
        return {"state": state, "param_groups": groups, _DROPOUT: list(self.draws)}

    def state_room(self, parameter: Tensor, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | Slice:
        """Memory for a stored tensor of a parameter: this rank's part of it."""
        at = self.model.place_of(parameter)
        if shape == () or shape != at.shape:
            return torch.empty(shape, dtype=dtype)
        return slice_of(torch.zeros_like(parameter, dtype=dtype, requires_grad=False), at, True)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave, from slices of this rank's layout. Local."""
        inner = self.inner.optimizer.state
        for number, (parameter, main) in enumerate(self._numbered()):
            saved = dict(state_dict["state"].get(number, {}))
            master = saved.pop(MASTER, None)
            if main is not parameter:
                main.copy_(parameter)
            if master is not None and main is not parameter:
                self._part(parameter, main).copy_(local_data(master))
            inner.pop(main, None)
            if saved:
                inner[main] = {key: self._fresh(parameter, value) for key, value in saved.items()}
        for own, kept in zip(self.param_groups, state_dict["param_groups"], strict=True):
            own.update({key: value for key, value in kept.items() if key != "params"})
        self.draws = [int(number) for number in state_dict.get(_DROPOUT, self.draws)]

    def _part(self, parameter: Tensor, like: Tensor) -> Tensor:
        return slice_of(like, self.model.place_of(parameter), True).data

    def _fresh(self, parameter: Tensor, value: Any) -> Any:  # Any: state is nested freely
        if not isinstance(value, Slice):
            return value.clone() if isinstance(value, Tensor) else value
        room = torch.zeros_like(parameter, dtype=value.data.dtype, requires_grad=False)
        self._part(parameter, room).copy_(value.data)
        return room

    def keeping(self) -> Callable[[], None]:
        """What puts the state back as it is now: for a load that fails. Local."""
        before = _copied(self.state_dict())
        return lambda: self.load_state_dict(before)

    def reload(self) -> None:
        """Take the model's weights as the master weights. Local."""
        self.inner.reload_model_params()


def _wrapped(given: torch.optim.Optimizer, half: bool) -> Any:  # Any: megatron-core is untyped
    """megatron-core's own optimizer around the user's."""
    with megatron_engine.quiet():
        config = megatron_engine.package("optimizer").OptimizerConfig(
            bf16=half, params_dtype=torch.bfloat16 if half else torch.float32, clip_grad=0.0
        )
        kinds = megatron_engine.package("optimizer.optimizer")
        if half:
            return kinds.Float16OptimizerWithFloat16Params(given, config, None, None)
        return kinds.FP32Optimizer(given, config, None)


def _copied(tree: Any) -> Any:  # Any: an optimizer's state dict
    if isinstance(tree, Slice):
        return Slice(tree.data.clone(), tree.shape, tree.offset, tree.owned)
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list) else tree
