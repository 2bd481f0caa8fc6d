"""Settings of optimization: gradient accumulation."""

from typing import Final

from hasten.config.base import Section, setting, settings

MAX_MICRO_STEPS: Final = 1_000_000


@settings
class GradientAccumulationPlugin(Section):
    """How gradients are accumulated over micro-steps."""

    num_steps: int = setting(
        1, "micro-steps per optimizer update", minimum=1, maximum=MAX_MICRO_STEPS, flag="gradient_accumulation_steps"
    )
    adjust_scheduler: bool = setting(True, "accepted for compatibility: schedulers count updates either way")
    sync_with_dataloader: bool = setting(True, "finish the window at the end of the loader")
    sync_each_batch: bool = setting(False, "reduce gradients in every micro-step: less memory, more traffic")
