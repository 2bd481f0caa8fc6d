"""Gradients sent as float16."""

from small_loop import train

from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs


def run() -> object:
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    return train(Accelerator(cpu=True, kwargs_handlers=[handler]))


PROCESSES = (1, 2)
