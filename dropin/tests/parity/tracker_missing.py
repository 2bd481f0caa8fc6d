"""Trackers whose package is missing are left out; a warning says so when none is left."""

import tempfile
import warnings

from accelerate import Accelerator


def run() -> object:
    found = []
    for asked in ("wandb", ["tensorboard", "wandb"], ["wandb", "comet_ml"], None):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            accelerator = Accelerator(
                cpu=True, log_with=asked, project_dir=tempfile.mkdtemp()
            )
        said = [str(one.message) for one in said if "log_with" in str(one.message)]
        found.append([[str(kind) for kind in accelerator.log_with], said])
    try:
        Accelerator(cpu=True, log_with="nothing", project_dir=tempfile.mkdtemp())
    except ValueError as error:
        found.append(str(error).split(". Choose")[0])
    return found


PROCESSES = (1, 2)
