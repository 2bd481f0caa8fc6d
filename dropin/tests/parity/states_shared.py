"""The dictionaries that states share, before, during and after; a device that torch was told to accept."""

import os
from unittest.mock import patch

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import GradientAccumulationPlugin, patch_environment


def run() -> object:
    kinds = (PartialState, AcceleratorState, GradientState)
    observations: list[object] = [[kind._shared_state == {} for kind in kinds]]
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3)
    )
    accelerator.gradient_accumulation_steps = 4
    observations.append([kind._shared_state == {} for kind in kinds])
    observations.append(
        [
            GradientState._shared_state["plugin_kwargs"],
            GradientState().initialized,
            accelerator.multi_device,
        ]
    )
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    observations.append([kind._shared_state == {} for kind in kinds])
    if "WORLD_SIZE" not in os.environ:
        with (
            patch("torch.cuda.set_device"),
            patch_environment(ACCELERATE_TORCH_DEVICE="cuda:64"),
        ):
            observations.append(str(Accelerator().state.device))
    return observations


PROCESSES = (1, 2)
