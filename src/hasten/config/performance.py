"""Settings of what is done for speed without being asked for one by one."""

from typing import Literal

from hasten.config.base import Section, setting, settings


@settings
class PerformanceSettings(Section):
    """Choices that change results by rounding at most; each is made where it applies, logged with its reason, and can be turned off."""

    mode: Literal["auto", "off"] | None = setting(
        None,
        "make the choices below where they apply (default: off, or auto when one of them is given)",
        flag="performance",
    )
    fused: bool = setting(True, "fused optimizers on CUDA, where torch has them")
    buckets: bool = setting(True, "size of DDP's buckets by the size of the model")
    compile: bool = setting(True, "compile repeated blocks, in the background, once a step has shown their inputs")
    step_graph: bool = setting(True, "run steps given to capture_step() as one CUDA graph")
