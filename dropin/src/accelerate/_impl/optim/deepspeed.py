"""DeepSpeed: the established names of what prepare() returns, and an engine used by hand."""

from __future__ import annotations

from typing import Any

import torch

from accelerate._impl.enums import DistributedType
from accelerate._impl.optim.optimizer import AcceleratedOptimizer
from accelerate._impl.optim.scheduler import AcceleratedScheduler
from accelerate._impl.settings.deepspeed_plugin import active_plugin
from accelerate._impl.surface.messages import message

# Any in this file: DeepSpeed is untyped, and so are parameters, groups and options.


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """The optimizer of an engine."""


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A scheduler of an engine: it advances once per update, on any number of processes."""

    def _num_scheduler_steps(self) -> int:
        return 1


class DeepSpeedEngineWrapper:
    """One engine of DeepSpeed's that is used by hand, with a step at every boundary of its own."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(
        self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any
    ) -> None:
        """Backpropagate the loss; where gradients are synchronised, update the parameters too."""
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> Any:
        """Return the norm of the last update's gradients, as a number where it is one."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if hasattr(norm, "item") else norm


def get_active_deepspeed_plugin(state: Any) -> Any:
    """Return the plugin in use. Raises: ValueError without DeepSpeed."""
    if state.distributed_type != DistributedType.DEEPSPEED:
        raise ValueError(message("no_active_deepspeed_plugin"))
    return active_plugin(state.deepspeed_plugins)


def map_pytorch_optim_to_deepspeed(
    optimizer: torch.optim.Optimizer,
) -> torch.optim.Optimizer:
    """Return the optimizer as it is: hasten lets DeepSpeed use the script's own, with offload too."""
    return optimizer
