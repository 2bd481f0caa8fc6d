"""Text of a plan: ranked rows, reasons for the best one, requirements of faster ones, and its settings. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

from hasten.config.root import Config
from hasten.config.sections.launch import LaunchConfig
from hasten.config.sections.loop import GradientAccumulationPlugin
from hasten.config.sections.parallel import FullyShardedDataParallelPlugin, ParallelismConfig
from hasten.extensions.planning.plan.search import SIMPLER, LayoutPlan, Option
from hasten.extensions.planning.plan.traced import Candidate
from hasten.runtime.bytes_plan import shown, size
from hasten.runtime.mesh_plan import BATCH

Test = Callable[[Candidate], bool]


def why(plan: LayoutPlan) -> list[str]:
    """Return one sentence per choice of the best option, with the cost of the nearest option without that choice."""
    best = plan.best
    lines = [f"{best.candidate.words}: {best.time.words()}", f"memory of a rank: {best.need.words()}"]
    if plan.fastest is not best:
        lines.append(_simpler(plan))
    for title, alike in _alternatives(best.candidate):
        others = [option for option in plan.options if option is not best and alike(option.candidate)]
        if others:
            other = min(others, key=lambda option: (not option.fits, option.time.total))
            lines.append(f"{title}: {_compared(other, plan)}")
    return lines


def _simpler(plan: LayoutPlan) -> str:
    """Return the reason why the best option is not the fastest."""
    gain = plan.best.time.total / plan.fastest.time.total - 1
    return f"simpler than {_words(plan.fastest)}, which is predicted {gain:.1%} faster: within {SIMPLER:.0%} the simpler one is chosen"


def _alternatives(chosen: Candidate) -> Iterator[tuple[str, Test]]:
    """Yield the choices that could be made differently, with a test for candidates that differ only in that choice."""

    def same(candidate: Candidate, *apart: str) -> bool:
        names = {"recompute", "offload", "precision", "sharded"} - set(apart)
        return all(getattr(candidate, name) == getattr(chosen, name) for name in names)

    word = "without" if chosen.recompute else "with"
    yield (
        f"{word} recompute",
        lambda c: c.recompute != chosen.recompute and same(c, "recompute") and c.mesh == chosen.mesh,
    )
    if chosen.sharded:
        yield "as replicas (ddp)", lambda c: not c.sharded and c.mesh.tp == 1 and c.precision == chosen.precision
    elif chosen.mesh.world_size > 1:
        yield "sharded (fsdp)", lambda c: c.sharded and not c.offload and same(c, "sharded") and c.mesh.tp == 1
    if chosen.mesh.tp > 1:
        yield "without split layers", lambda c: c.mesh.tp == 1 and same(c, "recompute")
    elif chosen.sharded:
        yield "with split layers", lambda c: c.mesh.tp > 1 and same(c, "recompute")
    if chosen.offload:
        yield "without host memory", lambda c: not c.offload and same(c, "offload", "recompute")
    if chosen.precision != "no":
        yield "in fp32", lambda c: c.precision == "no" and same(c, "precision", "recompute")


def _compared(other: Option, plan: LayoutPlan) -> str:
    has = plan.request.accelerator.memory_bytes
    if not other.fits:
        return f"does not fit, needs {size(other.need.total)} of {size(has)}"
    slower = other.time.total / plan.best.time.total - 1
    return f"{abs(slower):.0%} {'slower' if slower >= 0 else 'faster'} ({seconds(other.time.total)} a step)"


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
        parallelism = replace(parallelism, dp_replicate_size=mesh.dp_replicate, dp_shard_size=mesh.dp_shard)
    return Config(
        mixed_precision=chosen.precision,
        strategy="fsdp" if chosen.sharded else "auto",
        recompute=plan.trace.block_classes if chosen.recompute else (),
        parallelism=parallelism,
        fsdp=FullyShardedDataParallelPlugin(reshard_after_forward=chosen.reshard, cpu_offload=chosen.offload),
        gradient_accumulation=GradientAccumulationPlugin(num_steps=chosen.micro_steps),
        launch=LaunchConfig(num_processes=plan.request.gpus, num_machines=machines),
    )


def notes(plan: LayoutPlan, option: Option) -> list[str]:
    """Return notes that settings cannot express: the batch size of the script's loader, and the bytes sent."""
    chosen = option.candidate
    reads, steps = _count(chosen.mesh.size(*BATCH), "rank"), _count(chosen.micro_steps, "micro-step")
    return [
        f"give the DataLoader batch_size={chosen.micro_batch} (read by {reads}, {steps}: {chosen.global_batch} samples an update)",
        *_fixed(plan, option),
        f"each rank sends {shown(option.time.sent)} in an update",
        *([f"{size(option.need.host)} of host memory for each rank"] if option.need.host else []),
        *([f"the peak of activations is in {option.need.peak_module}"] if option.need.peak_module else []),
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
