"""The names of the traces a profiled block leaves, and what its handler is told."""

import os
import tempfile

import torch

from accelerate import Accelerator, ProfileKwargs
from accelerate.utils import PROFILE_PATTERN_NAME, broadcast_object_list


def run() -> object:
    accelerator = Accelerator(cpu=True)
    cycles = {"wait": 1, "warmup": 1, "active": 2, "repeat": 2, "skip_first": 0}
    profiles = []
    for kwargs in (
        {},
        {"schedule_option": cycles},
        {"schedule_option": cycles, "on_trace_ready": "told"},
    ):
        traced_steps = []
        if "on_trace_ready" in kwargs:
            kwargs = {
                **kwargs,
                "on_trace_ready": lambda profile, traced_steps=traced_steps: (
                    traced_steps.append(profile.step_num)
                ),
            }
        folder = broadcast_object_list([tempfile.mkdtemp()])[0]
        with accelerator.profile(
            ProfileKwargs(activities=["cpu"], output_trace_dir=folder, **kwargs)
        ) as profile:
            for _ in range(9):
                torch.ones(2) + 1
                profile.step()
        accelerator.wait_for_everyone()
        profiles.append([sorted(os.listdir(folder)), traced_steps])
    return [profiles, PROFILE_PATTERN_NAME]


PROCESSES = (1, 2)
