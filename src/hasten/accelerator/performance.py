"""performance="auto": choices made for speed, each logged once with its reason and its off switch."""

from __future__ import annotations

from torch.optim import Optimizer

from hasten.config.root import Config
from hasten.optim import fused
from hasten.precision.base import Precision
from hasten.runtime.context import ProcessContext
from hasten.runtime.logs import get_logger
from hasten.strategies.choose import chooses_speed

log = get_logger(__name__)


class Performance:
    """The choices of one Accelerator. Nothing is chosen unless it was asked for."""

    def __init__(self, config: Config, ctx: ProcessContext, precision: Precision) -> None:
        self._config = config
        self._asked = config.performance
        self._active = chooses_speed(config.performance)
        self._ctx = ctx
        self._precision = precision

    def optimizer(self, optimizer: Optimizer) -> None:
        """Make an optimizer fused where torch can."""
        if not self._active or not self._asked.fused or fused.is_fused(optimizer):
            return
        name = type(optimizer).__name__
        if self._ctx.device.type != "cuda":
            self._say("%s stays as it is: fused kernels gain on CUDA, this process trains on %s", name, self._place)
        elif why := fused.refusal(optimizer):
            self._say("%s stays as it is: %s", name, why)
        else:
            fused.fuse(optimizer)
            self._say(
                "%s is fused: one kernel instead of several for each parameter, equal except for rounding; "
                "performance={'fused': False} turns it off",
                name,
            )

    def no_step_graph(self) -> str:
        """Why capture_step() leaves steps as they are in this run; empty when it may capture them."""
        config = self._config
        if not self._active:
            return "performance is off; Accelerator(performance='auto') captures it"
        if not self._asked.step_graph:
            return "performance.step_graph is off"
        if self._ctx.device.type != "cuda":
            return f"CUDA graphs need a CUDA device, this process trains on {self._place}"
        if self._ctx.world.size > 1:
            return f"{self._ctx.world.size} processes exchange gradients inside the step; only one process is captured"
        if self._precision.scaler is not None:
            return "mixed_precision='fp16' decides on the host whether an update is applied; 'bf16' can be captured"
        if config.numbers not in ("off", "report"):
            return f"numbers={config.numbers} looks at gradients on the host before each update"
        if config.gradient_accumulation.num_steps > 1:
            return "gradients are accumulated over micro-steps, which the host counts"
        if config.dynamo.makes_cuda_graphs:
            return (
                f"dynamo backend {config.dynamo.backend!r} in mode {config.dynamo.mode!r} makes CUDA graphs of its own"
            )
        return ""

    @property
    def _place(self) -> str:
        return self._ctx.device.type

    def _say(self, text: str, *values: object) -> None:
        if self._ctx.is_main:
            log.info(f"performance: {text}", *values)
