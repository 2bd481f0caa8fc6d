"""Pipelines for inference, on top of hasten's: a model divided over all processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

import hasten
from accelerate._impl import ambient
from accelerate._impl.models.planning import infer_auto_device_map
from accelerate._impl.tensors import copy_tensor_to_devices
from hasten import trees
from hasten.checkpoint.export import parse_size
from hasten.extensions.bigmodel.device_map import clean_device_map, module_nodes
from hasten.extensions.bigmodel.placement_plan import (
    Device,
    balance_limits,
    group_modules,
    place_modules,
)
from hasten.extensions.pipeline.inference import stage_starts

# Any in this file: arguments and outputs of the user's model.


def build_pipeline(
    model: nn.Module,
    split_points: Sequence[str],
    args: Any,
    kwargs: Any,
    num_chunks: int | None,
) -> ScheduleGPipe:
    """Return a schedule of torch's over the stages of a model traced with example inputs, one stage on each process."""
    process = ambient.start()
    split_spec = dict.fromkeys(split_points, SplitPoint.BEGINNING)
    traced = pipeline(
        model,
        mb_args=tuple(args or ()),
        mb_kwargs=dict(kwargs or {}),
        split_spec=split_spec,
    )
    stage = traced.build_stage(process.rank, device=process.device)
    return ScheduleGPipe(stage, num_chunks or process.world.size)


def pippy_forward(
    forward: Callable[..., Any],
    num_chunks: int,
    gather_output: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a batch through the stages: the first process gives the inputs, the last has the output, or all if it is gathered."""
    process = ambient.process()
    if process.num_processes == 1:
        return forward(*args, **kwargs)
    rows = find_pippy_batch_size(args, kwargs)
    if rows is None:
        raise ValueError("Could not find batch size from args or kwargs")
    args, kwargs = trees.map_tensors(
        partial(_lengthen_inputs, rows, -rows % num_chunks), (args, kwargs)
    )
    if process.is_main_process:
        output = forward(*args, **kwargs)
    else:
        output = forward()
    if gather_output:
        return copy_tensor_to_devices(output)[:rows]
    return output


def _lengthen_inputs(rows: int, missing: int, tensor: torch.Tensor) -> torch.Tensor:
    if missing and tensor.dim() and len(tensor) == rows:
        return torch.cat([tensor, *[tensor[-1:]] * missing])
    return tensor


def prepare_pippy(
    model: nn.Module,
    split_points: str | list[str] | None = "auto",
    no_split_module_classes: list[str] | None = None,
    example_args: tuple[Any, ...] | None = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> nn.Module:
    """Return the model with its blocks on all processes, for inference in micro-batches; the last has the output, or all if gathered."""
    context = ambient.start()
    points = None if split_points in (None, "auto") else split_points
    cuts: dict[str, Any] = {
        "split_points": [points] if isinstance(points, str) else points
    }
    options: dict[str, Any] = {
        "num_microbatches": num_chunks,
        "gather_output": bool(gather_output),
    }
    options["no_split_module_classes"] = no_split_module_classes or ()
    prepared = hasten.prepare_pipeline(
        model, cpu=context.device.type == "cpu" or None, **cuts, **options
    )
    prepared.hf_split_points = stage_starts(prepared)  # type: ignore[assignment]  # where the original puts them
    if example_args or example_kwargs:
        args, kwargs = trees.to_device(
            (tuple(example_args or ()), dict(example_kwargs or {})), context.device
        )
        prepared(*args, **kwargs)
    return prepared


def find_pippy_batch_size(
    args: tuple[Any, ...] | None, kwargs: Mapping[str, Any] | None
) -> int | None:
    """Return the rows of the first tensor among the arguments; None without one."""
    return trees.batch_size((args or (), dict(kwargs or {})))


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: list[str] | None = None,
    max_memory: dict[Any, Any] | None = None,
) -> dict[str, Any]:
    """Return which process would hold which module, when all hold about the same; processes count from 0."""
    if num_processes == 1:
        return infer_auto_device_map(
            model, None, no_split_module_classes, clean_result=False
        )
    model_atoms = group_modules(module_nodes(model, no_split_module_classes))
    model_bytes = sum(atom.num_bytes for atom in model_atoms)
    limits = []
    for rank in range(num_processes):
        limits.append(parse_size(max_memory[rank]) if max_memory else model_bytes)
    devices = []
    for rank, limit in enumerate(balance_limits(model_atoms, limits)):
        devices.append(Device(rank, limit))
    return clean_device_map(dict(place_modules(model_atoms, devices).places))
