"""Text of a plan: ranked rows, reasons for the best one, requirements of faster ones, and its settings. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from hasten.config.root import Config
from hasten.config.sections.launch import LaunchConfig
from hasten.config.sections.loop import GradientAccumulationPlugin
from hasten.config.sections.parallel import (
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from hasten.extensions.planning.plan.search import SIMPLER, LayoutPlan, Option
from hasten.runtime.bytes_plan import shown, size
from hasten.runtime.mesh_plan import BATCH


def why(plan: LayoutPlan) -> list[str]:
    """Return the reasons for the best option: its time, its memory, and why it is preferred to a faster one."""
    best = plan.best
    lines = [
        f"{best.candidate.words}: {best.time.words()}",
        f"memory of a rank: {best.need.words()}",
    ]
    if plan.fastest is not best:
        lines.append(_simpler(plan))
    return lines


def _simpler(plan: LayoutPlan) -> str:
    """Return the reason why the best option is not the fastest."""
    gain = plan.best.time.total / plan.fastest.time.total - 1
    return f"simpler than {_words(plan.fastest)}, which is predicted {gain:.1%} faster: within {SIMPLER:.0%} the simpler one is chosen"


def _words(option: Option) -> str:
    chosen = option.candidate
    extras = [name for name in ("recompute", "offload") if getattr(chosen, name)]
    return ", ".join([chosen.words, *extras, f"micro-batch {chosen.micro_batch}"])


def rows(plan: LayoutPlan, most: int) -> list[dict[str, Any]]:
    """Return the first options as rows, for a table or JSON."""
    return [_row(plan, option) for option in plan.options[:most]]


def _row(plan: LayoutPlan, option: Option) -> dict[str, Any]:
    chosen, total = option.candidate, option.time.total
    return {
        "layout": chosen.words,
        "strategy": chosen.strategy,
        "mesh": asdict(chosen.mesh),
        "precision": chosen.precision,
        "recompute": chosen.recompute,
        "offload": chosen.offload,
        "reshard": chosen.reshard,
        "micro_batch": chosen.micro_batch,
        "micro_steps": chosen.micro_steps,
        "fits": option.fits,
        "memory_bytes": asdict(option.need) | {"total": option.need.total},
        "sent_bytes": option.time.sent,
        "step_s": total,
        "samples_per_s": chosen.global_batch / total,
        "mfu": option.time.mfu(plan.request.accelerator, chosen),
        "why": _reason(plan, option),
    }


def _reason(plan: LayoutPlan, option: Option) -> str:
    if not option.fits:
        return f"needs {size(option.need.total)}"
    if option is plan.best and plan.fastest is not option:
        return f"{option.time.words()}; {_simpler(plan)}"
    return option.time.words()


def summary(plan: LayoutPlan) -> dict[str, Any]:
    """Return the whole plan as data for JSON."""
    return {
        "model": plan.trace.name,
        "parameters": plan.trace.num_parameters,
        "gpus": plan.request.gpus,
        "gpu": plan.request.accelerator.name,
        "global_batch": plan.request.global_batch,
        "options": rows(plan, len(plan.options)),
        "why": why(plan),
    }


def config_of(plan: LayoutPlan, option: Option) -> Config:
    """Return the settings of one option; the loader's batch size remains the script's."""
    chosen, mesh = option.candidate, option.candidate.mesh
    machines = -(-plan.request.gpus // plan.request.accelerator.per_node)
    parallelism = ParallelismConfig(tp_size=mesh.tp)
    if chosen.sharded:
        parallelism = replace(
            parallelism,
            dp_replicate_size=mesh.dp_replicate,
            dp_shard_size=mesh.dp_shard,
        )
    return Config(
        mixed_precision=chosen.precision,
        strategy="fsdp" if chosen.sharded else "auto",
        recompute=plan.trace.block_classes if chosen.recompute else (),
        parallelism=parallelism,
        fsdp=FullyShardedDataParallelPlugin(
            reshard_after_forward=chosen.reshard, cpu_offload=chosen.offload
        ),
        gradient_accumulation=GradientAccumulationPlugin(num_steps=chosen.micro_steps),
        launch=LaunchConfig(num_processes=plan.request.gpus, num_machines=machines),
    )


def notes(plan: LayoutPlan, option: Option) -> list[str]:
    """Return notes that settings cannot express: the batch size of the script's loader, and the bytes sent."""
    chosen = option.candidate
    reads, steps = (
        _count(chosen.mesh.size(*BATCH), "rank"),
        _count(chosen.micro_steps, "micro-step"),
    )
    return [
        f"give the DataLoader batch_size={chosen.micro_batch} (read by {reads}, {steps}: {chosen.global_batch} samples an update)",
        *_fixed(plan, option),
        f"each rank sends {shown(option.time.sent)} in an update",
        *(
            [f"{size(option.need.host)} of host memory for each rank"]
            if option.need.host
            else []
        ),
        *(
            [f"the peak of activations is in {option.need.peak_module}"]
            if option.need.peak_module
            else []
        ),
    ]


def _fixed(plan: LayoutPlan, option: Option) -> Iterator[str]:
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


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def seconds(value: float) -> str:
    """Return a time with a suitable unit."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.{1 if value >= 0.01 else 2}f} ms"
