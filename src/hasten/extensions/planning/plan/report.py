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


def why(plan: LayoutPlan) -> list[str]:
    """Return the reasons for the best option: its time and its memory."""
    return [
        f"{plan.best.candidate.words}: {plan.best.time.words()}",
        f"memory of a rank: {plan.best.need.words()}",
    ]


def config_of(plan: LayoutPlan, option: Option) -> Config:
    """Return the settings of one option; the loader's batch size remains the script's."""
    layout, mesh = option.candidate, option.candidate.mesh
    machines = -(-plan.request.gpus // plan.request.accelerator.per_node)
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
        recompute=plan.trace.block_classes if layout.recompute else (),
        parallelism=parallelism,
        fsdp=FullyShardedDataParallelPlugin(
            reshard_after_forward=layout.reshard, cpu_offload=layout.offload
        ),
        gradient_accumulation=GradientAccumulationPlugin(num_steps=layout.micro_steps),
        launch=LaunchConfig(num_processes=plan.request.gpus, num_machines=machines),
    )


def notes(plan: LayoutPlan, option: Option) -> Iterator[str]:
    """Yield notes that settings cannot express: the batch size of the script's loader, overridden settings, and the bytes sent."""
    layout = option.candidate
    yield (
        f"give the DataLoader batch_size={layout.micro_batch} (read by {layout.mesh.size(*BATCH)} ranks in {layout.micro_steps} micro-steps: "
        f"{layout.global_batch} samples an update)"
    )
    yield from _overrides(plan, option)
    yield f"each rank sends {format_traffic(option.time.sent)} in an update"
    if option.need.host:
        yield f"{format_bytes(option.need.host)} of host memory for each rank"


def _overrides(plan: LayoutPlan, option: Option) -> Iterator[str]:
    """Yield a note for each setting that the script fixes in its code, where it overrides the file."""
    config = config_of(plan, option)
    planned: dict[str, tuple[str | int, ...]] = {
        "mixed_precision": (config.mixed_precision,),
        "gradient_accumulation_steps": (config.gradient_accumulation.num_steps,),
        "strategy": (config.strategy, option.candidate.strategy),
    }
    for name, value in plan.trace.own:
        if value not in planned[name]:
            yield (
                f"remove {name}={value!r} from the script's Accelerator(): it overrides the settings, which have {planned[name][0]!r}"
            )


def seconds(value: float) -> str:
    """Return a time with a suitable unit."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.{1 if value >= 0.01 else 2}f} ms"
