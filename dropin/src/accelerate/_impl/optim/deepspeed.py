"""DeepSpeed: its configuration, stand-ins for what it makes, and the established names of what prepare() returns."""

from __future__ import annotations

from typing import Any

import torch

from accelerate._impl.enums import DistributedType
from accelerate._impl.optim.optimizer import AcceleratedOptimizer
from accelerate._impl.optim.scheduler import AcceleratedScheduler
from accelerate._impl.surface.homes import settle
from hasten.optim import dummy

# Any in this file: DeepSpeed is untyped, and so are parameters, groups and options.


class DummyOptim(dummy.DummyOptim):
    """Stands for the optimizer in DeepSpeed's configuration."""

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        super().__init__(params, lr, weight_decay, **kwargs)
        self.params, self.lr, self.weight_decay, self.kwargs = params, lr, weight_decay, kwargs


class DummyScheduler(dummy.DummyScheduler):
    """Stands for the scheduler in DeepSpeed's configuration."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer, total_num_steps, warmup_num_steps, lr_scheduler_callable, **kwargs)
        self.total_num_steps, self.warmup_num_steps = total_num_steps, warmup_num_steps
        self.lr_scheduler_callable, self.kwargs = lr_scheduler_callable, kwargs


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """The optimizer of an engine."""


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A scheduler that an engine makes: it advances once per update, on any number of processes."""

    def _times(self) -> int:
        return 1


class DeepSpeedEngineWrapper:
    """One engine of DeepSpeed's that is used by hand, with a step at every boundary of its own."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Backpropagate the loss; where gradients are synchronised, update the parameters too."""
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> Any:
        """The norm of the last update's gradients, as a number where it is one."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if hasattr(norm, "item") else norm


def get_active_deepspeed_plugin(state: Any) -> Any:
    """The plugin in use. Raises: ValueError without DeepSpeed."""
    if state.distributed_type != DistributedType.DEEPSPEED:
        raise ValueError(
            "Couldn't retrieve the active `DeepSpeedPlugin` as none were enabled. Please make sure that either "
            "`Accelerator` is configured for `deepspeed` or make sure that the desired `DeepSpeedPlugin` has been enabled "
            "(`AcceleratorState().select_deepspeed_plugin(name)`) before calling this function."
        )
    plugins = state.deepspeed_plugins
    if not isinstance(plugins, dict):
        return plugins
    return next(plugin for plugin in plugins.values() if plugin.selected)


def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer as it is: hasten lets DeepSpeed use the script's own, with offload too."""
    return optimizer


settle(__name__, "accelerate.utils.deepspeed")
