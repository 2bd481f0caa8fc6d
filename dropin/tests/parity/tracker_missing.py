"""Trackers whose package is missing are left out; a warning says so when none is left."""

import tempfile
import warnings

from accelerate import Accelerator


def run() -> object:
    observations = []
    for log_with in ("wandb", ["tensorboard", "wandb"], ["wandb", "comet_ml"], None):
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            accelerator = Accelerator(
                cpu=True, log_with=log_with, project_dir=tempfile.mkdtemp()
            )
        messages = [
            str(warning.message)
            for warning in messages
            if "log_with" in str(warning.message)
        ]
        observations.append([[str(kind) for kind in accelerator.log_with], messages])
    try:
        Accelerator(cpu=True, log_with="nothing", project_dir=tempfile.mkdtemp())
    except ValueError as error:
        observations.append(str(error).split(". Choose")[0])
    return observations


PROCESSES = (1, 2)
