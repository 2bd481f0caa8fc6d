"""Inference on all processes through the stages of a model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from hasten.accelerator.facade import Accelerator
from hasten.config.sections.parallel import ParallelismConfig, PipelineParallelConfig
from hasten.errors import ConfigError
from hasten.extensions.pipeline.passes import StageForward
from hasten.modules import forwarding
from hasten.modules.names import TAG
from hasten.runtime.logs import get_logger

log = get_logger(__name__)


class _WithoutGradients(forwarding.Forward):
    """Forward that runs under `torch.no_grad()`."""

    tag = "inference"

    # Any: the user's arguments and outputs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.inner(*args, **kwargs)


def prepare_pipeline(
    model: nn.Module,
    split_points: Sequence[str] | None = None,
    num_microbatches: int | None = None,
    gather_output: bool = True,
    cpu: bool | None = None,
    no_split_module_classes: Collection[str] = (),
) -> nn.Module:
    """Return the model in evaluation mode with its blocks divided over all processes; calls record no gradients.

    A batch is split into `num_microbatches` micro-batches (by default one per process), so that processes work at the same time. Stages
    start at the blocks named in `split_points`, or hold equal work. The output is returned on every process, or with
    `gather_output=False` on the last one and None elsewhere. A single process runs the whole model. Modules of
    `no_split_module_classes` must not be split over processes.
    Ranks: every rank, here and in every call, with the same arguments; weights come from rank 0.
    Raises: PrepareError or ConfigError with a remedy, for a model that cannot be split.
    """
    pipeline_config = PipelineParallelConfig(
        schedule="gpipe",
        num_microbatches=num_microbatches,
        split_points=None if split_points is None else tuple(split_points),
    )
    accelerator = Accelerator(
        cpu=cpu,
        parallelism_config=ParallelismConfig(pp_size=-1, pp_handler=pipeline_config),
    )
    prepared_model = accelerator.prepare_model(model.eval(), evaluation_mode=True)
    stage_forward = forwarding.find(prepared_model, TAG)
    if isinstance(stage_forward, StageForward):
        stage_forward.gathers_output = gather_output
        _check_whole(
            prepared_model, stage_forward.line.cut.container, no_split_module_classes
        )
        log.info(
            "%s: stages behind the first begin at %s",
            type(model).__name__,
            ", ".join(stage_starts(prepared_model)),
        )
    forwarding.replace(prepared_model, _WithoutGradients())
    return prepared_model


def stage_starts(model: nn.Module) -> list[str]:
    """Return the first block of each pipeline stage except the first stage; empty for a model that is not split."""
    stage_forward = forwarding.find(model, TAG)
    if not isinstance(stage_forward, StageForward):
        return []
    stage_cut = stage_forward.line.cut
    name_prefix = f"{stage_cut.container}." if stage_cut.container else ""
    first_names = []
    for first_block, _ in stage_cut.ranges[1:]:
        first_names.append(name_prefix + stage_cut.blocks[first_block])
    return first_names


def _check_whole(
    model: nn.Module, container_name: str, class_names: Collection[str]
) -> None:
    """Raise if the model is split inside a module that must stay whole."""
    path_parts = container_name.split(".") if container_name else []
    for depth in range(len(path_parts) + 1):
        module_name = ".".join(path_parts[:depth])
        class_name = type(model.get_submodule(module_name)).__name__
        if class_name in class_names:
            raise ConfigError(
                f"no_split_module_classes names {class_name}, but {type(model).__name__} is cut between the blocks of "
                f"{container_name!r}, which lie inside of {module_name or 'the model itself'!r}. Name the class of the blocks instead."
            )
