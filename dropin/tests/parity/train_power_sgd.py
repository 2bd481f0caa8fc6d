"""Gradients compressed by PowerSGD."""

from small_loop import train

from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs


def run() -> object:
    options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2}
    handler = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType.POWER_SGD, comm_state_option=options
    )
    return train(Accelerator(cpu=True, kwargs_handlers=[handler]))


PROCESSES = (1, 2)
