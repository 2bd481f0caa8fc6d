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
    handler = PipelineParallelConfig(
        schedule="gpipe",
        num_microbatches=num_microbatches,
        split_points=None if split_points is None else tuple(split_points),
    )
    accelerator = Accelerator(
        cpu=cpu, parallelism_config=ParallelismConfig(pp_size=-1, pp_handler=handler)
    )
    prepared = accelerator.prepare_model(model.eval(), evaluation_mode=True)
    stage = forwarding.find(prepared, TAG)
    if isinstance(stage, StageForward):
        stage.gathers_output = gather_output
        _check_whole(prepared, stage.line.cut.container, no_split_module_classes)
        log.info(
            "%s: stages behind the first begin at %s",
            type(model).__name__,
            ", ".join(stage_starts(prepared)),
        )
    forwarding.replace(prepared, _WithoutGradients())
    return prepared


def stage_starts(model: nn.Module) -> list[str]:
    """Return the first block of each pipeline stage except the first stage; empty for a model that is not split."""
    stage = forwarding.find(model, TAG)
    if not isinstance(stage, StageForward):
        return []
    cut = stage.line.cut
    prefix = f"{cut.container}." if cut.container else ""
    return [prefix + cut.blocks[first] for first, _ in cut.ranges[1:]]


def _check_whole(model: nn.Module, container: str, classes: Collection[str]) -> None:
    """Raise if the model is split inside a module that must stay whole."""
    parts = container.split(".") if container else []
    for name in (".".join(parts[:depth]) for depth in range(len(parts) + 1)):
        kind = type(model.get_submodule(name)).__name__
        if kind in classes:
            raise ConfigError(
                f"no_split_module_classes names {kind}, but {type(model).__name__} is cut between the blocks of "
                f"{container!r}, which lie inside of {name or 'the model itself'!r}. Name the class of the blocks instead."
            )
