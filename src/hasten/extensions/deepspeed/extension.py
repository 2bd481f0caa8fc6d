"""What the extension offers: a strategy, and DeepSpeed's own launcher."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="deepspeed",
    summary="DeepSpeed: ZeRO 0 to 3 with offload to host memory",
    settings={"deepspeed": "hasten.extensions.deepspeed.settings:DeepSpeedPlugin"},
    strategies={"deepspeed": "hasten.extensions.deepspeed.strategy:STRATEGY"},
    strategy_packages={"deepspeed": "deepspeed"},
    public_names={
        "DeepSpeedPlugin": "hasten.extensions.deepspeed.settings:DeepSpeedPlugin",
        "DummyOptim": "hasten.extensions.deepspeed.placeholders:DummyOptim",
        "DummyScheduler": "hasten.extensions.deepspeed.placeholders:DummyScheduler",
    },
    launch_targets={"deepspeed": "hasten.extensions.deepspeed.launch_target:TARGET"},
)
