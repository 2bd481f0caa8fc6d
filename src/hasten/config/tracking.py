"""Settings of observation: experiment trackers and the profiler."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from hasten.config.base import Section, setting, settings


@settings
class ProfileKwargs(Section):
    """Options of torch.profiler."""

    activities: tuple[Literal["cpu", "cuda", "xpu", "mtia", "hpu"], ...] | None = setting(
        None, "what is recorded (default: all present)"
    )
    schedule_option: Mapping[str, int] | None = setting(None, "wait, warmup, active, repeat, skip_first of a schedule")
    on_trace_ready: Callable[..., Any] | None = setting(None, "called with every finished trace", code_only=True)
    record_shapes: bool = setting(False, "record input shapes")
    profile_memory: bool = setting(False, "record allocations")
    with_stack: bool = setting(False, "record source lines")
    with_flops: bool = setting(False, "estimate operations of matrix products and convolutions")
    with_modules: bool = setting(False, "record the module hierarchy")
    output_trace_dir: str | None = setting(None, "folder of one Chrome trace per rank", path=True)


@settings
class TrackingConfig(Section):
    """Which experiment trackers are started."""

    log_with: tuple[str, ...] = setting((), "trackers: jsonl, tensorboard, wandb, mlflow, …, or all")
    missing_tracker: Literal["error", "warn"] = setting(
        "error", "what to do if the package of a named tracker is not installed; warn continues without it"
    )
