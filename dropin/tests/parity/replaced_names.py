"""Names of modules that tests replace act where the module's functions use them, and nowhere afterwards."""

from unittest.mock import patch

import torch

from accelerate import Accelerator, find_executable_batch_size
from accelerate.data_loader import DataLoaderShard


def run() -> object:
    accelerator = Accelerator(cpu=True)
    tensor, observations = torch.ones(1), []
    for name in ("gather", "reduce", "pad_across_processes"):
        with patch(f"accelerate.accelerator.{name}", return_value=name):
            observations.append(getattr(accelerator, name)(tensor))
        observations.append(getattr(accelerator, name)(tensor).tolist())
    with patch("accelerate.accelerator.release_memory", return_value="released"):
        observations.append(accelerator.free_memory(tensor))
    with patch("accelerate.utils.memory.clear_device_cache") as cleared:
        find_executable_batch_size(lambda size: size)()
        observations.append(str(cleared.call_args))
    with patch(
        "accelerate.data_loader.is_torchdata_stateful_dataloader_available",
        return_value=False,
    ):
        try:
            DataLoaderShard(range(4), use_stateful_dataloader=True)
        except ImportError as error:
            observations.append(str(error))
    with patch("accelerate.utils.operations.PartialState"):
        observations.append(repr(accelerator.state))
    return [*observations, repr(accelerator.state)]


PROCESSES = (1,)
