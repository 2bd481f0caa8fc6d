"""What handlers give of what was set."""

from datetime import timedelta

from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)


def run() -> object:
    handlers = [
        AutocastKwargs(enabled=False),
        DistributedDataParallelKwargs(find_unused_parameters=True),
        GradScalerKwargs(init_scale=4.0),
        InitProcessGroupKwargs(timeout=timedelta(seconds=5)),
        ProfileKwargs(record_shapes=True),
    ]
    return [
        {name: str(value) for name, value in handler.to_kwargs().items()}
        for handler in handlers
    ]


PROCESSES = (1,)
