"""A folder with another number of registered objects, the weights that save hooks get, and wrappers inside a model."""

import tempfile
from typing import Any

from torch import nn

from accelerate import Accelerator
from accelerate.utils import RNGType, extract_model_from_parallel, synchronize_rng_state


class Counter:
    """A number that is saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


def run() -> object:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    observations: list[object] = []
    accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: observations.append(type(weights[0]).__name__)
    )
    with tempfile.TemporaryDirectory() as folder:
        accelerator.register_for_checkpointing(Counter())
        accelerator.save_state(folder)
        accelerator.register_for_checkpointing(Counter())
        try:
            accelerator.load_state(folder)
        except RuntimeError as error:
            observations.append(str(error).replace(folder, "FOLDER"))
    model = nn.Sequential(nn.DataParallel(nn.Linear(1, 1)), nn.Linear(1, 1))
    observations.append(
        [
            type(module).__name__
            for module in extract_model_from_parallel(model, recursive=True)
        ]
    )
    try:
        synchronize_rng_state(RNGType.GENERATOR)
    except AssertionError as error:
        observations.append(str(error))
    for rank in ("context_parallel_rank", "pipeline_parallel_rank"):
        try:
            getattr(accelerator, rank)
        except NotImplementedError as error:
            observations.append(str(error))
    return observations


PROCESSES = (1,)
