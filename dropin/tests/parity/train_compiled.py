"""A model compiled by a dynamo plugin (eager backend)."""

from small_loop import train

from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin


def run() -> object:
    return train(
        Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    )


PROCESSES = (1, 2)
