"""`hasten launch --auto`: selection of the strategy for a script on a launch's processes, as settings with reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from hasten.config.root import Config
from hasten.config.source import SettingEntry, SettingSource
from hasten.errors import ConfigError
from hasten.tools.plan import report
from hasten.tools.plan.hardware import AcceleratorEntry, find
from hasten.tools.plan.search import LayoutPlan, PlanRequest, search
from hasten.tools.plan.targets import loop_of
from hasten.tools.plan.trace import trace
from hasten.tools.plan.traced import PrecisionName

_SOURCE: Final = SettingSource("file", "--auto")
"""Precedence below flags and variables: explicit settings win."""
_PRECISIONS: Final[Mapping[str, PrecisionName]] = MappingProxyType(
    {"no": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
)
"""The precision with which a setting is traced."""
_GIB: Final = 1024**3


@dataclass(frozen=True, slots=True)
class Chosen:
    """Chosen settings, and the reasons."""

    entries: tuple[SettingEntry, ...]
    reasons: tuple[str, ...]


def choose(
    script: Sequence[str],
    config: Config,
    processes: int,
    per_machine: int,
    device_name: str,
    host_memory_bytes: int,
) -> Chosen:
    """Return the strategy for `script` (its path and arguments) on the given number of processes.

    The script's batch size, accumulation and precision are unchanged; the strategy, recompute and offload are chosen.
    Raises: ConfigError when nothing fits, or the script does not reach a step.
    """
    if not script or not script[0].endswith(".py"):
        raise ConfigError("--auto plans a script by its first step; give a .py file, or remove --auto.")
    accelerator = _accelerator(device_name, per_machine, host_memory_bytes)
    precision = _PRECISIONS[config.mixed_precision]
    loop, name = loop_of(script[0], script[1:])
    traced = trace(loop, name, (precision,))
    own = dict(traced.own)
    if (fixed := own.get("mixed_precision", precision)) != precision and fixed in _PRECISIONS:
        precision = _PRECISIONS[str(fixed)]
        traced = trace(loop, name, (precision,))
    steps = int(own.get("gradient_accumulation_steps", config.gradient_accumulation.num_steps))
    batch = traced.batch_size or 1
    request = PlanRequest(
        gpus=processes,
        accelerator=accelerator,
        global_batch=batch * processes * steps,
        precisions=(precision,),
        micro_batch=batch,
        only_data=True,
    )
    plan = search(traced, request)
    return Chosen(tuple(_entries(plan)), tuple(report.why(plan)))


def _accelerator(device_name: str, per_machine: int, host_memory_bytes: int) -> AcceleratorEntry:
    if device_name:
        return find(device_name)
    share = host_memory_bytes / max(per_machine, 1) / _GIB
    return AcceleratorEntry(
        name="cpu",
        memory_gib=share,
        reserved_gib=0.5,
        tflops_bf16=0.2,
        tflops_fp32=0.2,
        memory_gb_s=20,
        node_gb_s=5,
        network_gb_s=1,
        per_node=per_machine,
    )


def _entries(plan: LayoutPlan) -> list[SettingEntry]:
    chosen = plan.best.candidate
    values: list[tuple[tuple[str, ...], Any]] = [(("strategy",), "fsdp" if chosen.sharded else "auto")]  # Any: settings
    if chosen.recompute:
        values.append((("recompute",), plan.trace.block_classes))
    if chosen.sharded:
        values += [
            (("parallelism", "dp_replicate_size"), chosen.mesh.dp_replicate),
            (("parallelism", "dp_shard_size"), chosen.mesh.dp_shard),
            (("fsdp", "reshard_after_forward"), chosen.reshard),
            (("fsdp", "cpu_offload"), chosen.offload),
        ]
    return [SettingEntry(path, value, _SOURCE, weak=True) for path, value in values]
