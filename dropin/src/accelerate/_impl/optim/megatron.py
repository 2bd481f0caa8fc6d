"""Megatron-LM: stand-ins that scripts give to prepare(), and losses and tensors over data-parallel processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from accelerate._impl import ambient
from accelerate._impl.optim.deepspeed import DeepSpeedSchedulerWrapper
from accelerate._impl.optim.optimizer import AcceleratedOptimizer
from accelerate._impl.surface import left_out
from hasten.comm import ops
from hasten.runtime.mesh_plan import BATCH

# Any in this file: nested containers of tensors, optimizers and options.


class AbstractTrainStep:
    def __init__(self, name: str) -> None:
        self.name = name

    def get_batch_func(self, *args: Any) -> Callable[..., Any] | None:
        """Return the function that reads a batch, runs the model, or gives the loss: none here."""
        return None

    get_forward_step_func = get_loss_func = get_batch_func


class MegatronLMDummyDataLoader:
    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args = dict(dataset_kwargs)


class MegatronLMDummyScheduler:
    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.kwargs = kwargs
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """The optimizer of an engine."""


class MegatronLMSchedulerWrapper(DeepSpeedSchedulerWrapper):
    """A scheduler beside an engine."""


def avg_losses_across_data_parallel_group(
    losses: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return the losses, averaged over the processes that read different samples. Ranks: every rank."""
    mean: torch.Tensor = ops.reduce(
        torch.stack([loss.detach().reshape(()) for loss in losses]), _batch(), "mean"
    )
    return mean


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Tensors of the processes that read different samples, joined along the first dimension. Ranks: every rank."""
    return ops.gather(tensor, _batch())


def _batch() -> Any:
    return ambient.start().groups(*BATCH)


BertTrainStep = left_out.klass("utils.BertTrainStep", AbstractTrainStep)
GPTTrainStep = left_out.klass("utils.GPTTrainStep", AbstractTrainStep)
T5TrainStep = left_out.klass("utils.T5TrainStep", AbstractTrainStep)
MegatronEngine = left_out.klass("utils.MegatronEngine")
_STEPS = "prepare_data_loader prepare_optimizer prepare_scheduler prepare_model_optimizer_scheduler finish_mpu_init"
initialize = left_out.function("utils.initialize")
for _name in (*_STEPS.split(), "model_provider_func"):
    globals()[_name] = left_out.function(f"utils.{_name}")
