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
    """What a train step of the user's own is made of."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any] | None:
        """The function that reads a batch."""
        return None

    def get_forward_step_func(self) -> Callable[..., Any] | None:
        """The function that runs the model."""
        return None

    def get_loss_func(self, accelerator: Any) -> Callable[..., Any] | None:
        """The function that gives the loss."""
        return None


class MegatronLMDummyDataLoader:
    """Stands for datasets of Megatron's own: options, kept as they are."""

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args = dict(dataset_kwargs)


class MegatronLMDummyScheduler:
    """Stands for a scheduler of Megatron's own."""

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer, self.kwargs = optimizer, kwargs
        self.total_num_steps, self.warmup_num_steps = total_num_steps, warmup_num_steps


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """The optimizer of an engine."""


class MegatronLMSchedulerWrapper(DeepSpeedSchedulerWrapper):
    """A scheduler beside an engine."""


def avg_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """The losses, averaged over the processes that read different samples. Ranks: every rank."""
    mean: torch.Tensor = ops.reduce(torch.stack([loss.detach().reshape(()) for loss in losses]), _batch(), "mean")
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
finish_mpu_init = left_out.function("utils.finish_mpu_init")
initialize = left_out.function("utils.initialize")
model_provider_func = left_out.function("utils.model_provider_func")
prepare_data_loader = left_out.function("utils.prepare_data_loader")
prepare_model_optimizer_scheduler = left_out.function("utils.prepare_model_optimizer_scheduler")
prepare_optimizer = left_out.function("utils.prepare_optimizer")
prepare_scheduler = left_out.function("utils.prepare_scheduler")
