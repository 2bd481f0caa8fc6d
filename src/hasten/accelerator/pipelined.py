"""A model divided over all processes for inference: each holds some of its blocks, and batches pass through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hasten.accelerator.facade import Accelerator
from hasten.config.parallel import ParallelismConfig, PipelineParallelConfig
from hasten.modules import forwarding
from hasten.modules.stages import TAG
from hasten.strategies.pipeline_pass import StageForward


class _WithoutGradients(forwarding.Forward):
    """A forward that no backward follows."""

    tag = "inference"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # Any: the user's own arguments and outputs
        with torch.no_grad():
            return self.inner(*args, **kwargs)


def prepare_pipeline(
    model: nn.Module,
    split_points: Sequence[str] | None = None,
    num_microbatches: int | None = None,
    gather_output: bool = True,
    cpu: bool | None = None,
) -> nn.Module:
    """The model in evaluation mode with its blocks divided over all processes; calling it keeps no gradients.

    A batch passes through in `num_microbatches` parts (one per process), so that processes work at the same time. Stages
    begin at the blocks named in `split_points`, or hold equal work. The output is on every process, or with
    `gather_output=False` on the last one, and None elsewhere. One process alone runs the whole model.
    Ranks: every rank, here and in every call, with the same arguments; weights come from rank 0.
    Raises: PrepareError or ConfigError for a model that cannot be cut, with what to do.
    """
    handler = PipelineParallelConfig(
        schedule="gpipe",
        num_microbatches=num_microbatches,
        split_points=None if split_points is None else tuple(split_points),
    )
    accelerator = Accelerator(cpu=cpu, parallelism_config=ParallelismConfig(pp_size=-1, pp_handler=handler))
    prepared = accelerator.prepare_model(model.eval(), evaluation_mode=True)
    stage = forwarding.find(prepared, TAG)
    if isinstance(stage, StageForward):
        stage.gathers_output = gather_output
    forwarding.replace(prepared, _WithoutGradients())
    return prepared
