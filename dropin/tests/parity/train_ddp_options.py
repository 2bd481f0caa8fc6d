"""Options of DDP."""

from small_loop import train

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs


def run() -> object:
    handler = DistributedDataParallelKwargs(
        find_unused_parameters=True, bucket_cap_mb=1, gradient_as_bucket_view=True
    )
    return train(Accelerator(cpu=True, kwargs_handlers=[handler]))


PROCESSES = (1, 2)
