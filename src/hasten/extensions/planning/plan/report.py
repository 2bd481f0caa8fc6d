"""Text of a plan: reasons for the best option, what settings cannot express, and its settings. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hasten.config.root import Config
from hasten.config.sections.launch import LaunchConfig
from hasten.config.sections.loop import GradientAccumulationPlugin
from hasten.config.sections.parallel import (
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from hasten.extensions.planning.plan.search import LayoutPlan, Option
from hasten.runtime.bytes_plan import format_bytes, format_traffic
from hasten.runtime.mesh_plan import BATCH


def explain_best(layout_plan: LayoutPlan) -> list[str]:
    """Return the reasons for the best option: its time and its memory."""
    return [
        f"{layout_plan.best.candidate.words}: {layout_plan.best.time.words()}",
        f"memory of a rank: {layout_plan.best.need.describe_kinds()}",
    ]


def make_config(layout_plan: LayoutPlan, option: Option) -> Config:
    """Return the settings of one option; the loader's batch size remains the script's."""
    layout = option.candidate
    mesh = option.candidate.mesh
    num_machines = -(
        -layout_plan.request.gpus // layout_plan.request.accelerator.per_node
    )
    parallelism = ParallelismConfig(tp_size=mesh.tp)
    if layout.sharded:
        parallelism = replace(
            parallelism,
            dp_replicate_size=mesh.dp_replicate,
            dp_shard_size=mesh.dp_shard,
        )
    return Config(
        mixed_precision=layout.precision,
        strategy="fsdp" if layout.sharded else "auto",
        recompute=layout_plan.trace.block_classes if layout.recompute else (),
        parallelism=parallelism,
        fsdp=FullyShardedDataParallelPlugin(
            reshard_after_forward=layout.reshard, cpu_offload=layout.offload
        ),
        gradient_accumulation=GradientAccumulationPlugin(num_steps=layout.micro_steps),
        launch=LaunchConfig(
            num_processes=layout_plan.request.gpus, num_machines=num_machines
        ),
    )


def list_notes(layout_plan: LayoutPlan, option: Option) -> Iterator[str]:
    """Yield notes that settings cannot express: the batch size of the script's loader, overridden settings, and the bytes sent."""
    layout = option.candidate
    yield (
        f"give the DataLoader batch_size={layout.micro_batch} (read by {layout.mesh.size(*BATCH)} ranks in {layout.micro_steps} micro-steps: "
        f"{layout.global_batch} samples an update)"
    )
    yield from _list_overrides(layout_plan, option)
    yield f"each rank sends {format_traffic(option.time.sent)} in an update"
    if option.need.host:
        yield f"{format_bytes(option.need.host)} of host memory for each rank"


def _list_overrides(layout_plan: LayoutPlan, option: Option) -> Iterator[str]:
    """Yield a note for each setting that the script fixes in its code, where it overrides the file."""
    config = make_config(layout_plan, option)
    planned_values: dict[str, tuple[str | int, ...]] = {
        "mixed_precision": (config.mixed_precision,),
        "gradient_accumulation_steps": (config.gradient_accumulation.num_steps,),
        "strategy": (config.strategy, option.candidate.strategy),
    }
    for setting_name, script_value in layout_plan.trace.script_settings:
        if script_value not in planned_values[setting_name]:
            yield (
                f"remove {setting_name}={script_value!r} from the script's Accelerator(): it overrides the settings, which have {planned_values[setting_name][0]!r}"
            )


def format_seconds(duration_s: float) -> str:
    """Return a time with a suitable unit."""
    if duration_s >= 1:
        return f"{duration_s:.2f} s"
    return f"{duration_s * 1e3:.{1 if duration_s >= 0.01 else 2}f} ms"
