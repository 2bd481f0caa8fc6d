"""Settings classes and what they hand on."""

from accelerate import DistributedType
from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    LoggerType,
    PrecisionType,
    ProjectConfiguration,
    RNGType,
    TorchDynamoPlugin,
)


def run() -> object:
    return [
        AutocastKwargs(enabled=False).to_kwargs(),
        GradScalerKwargs(init_scale=2.0).to_kwargs(),
        TorchDynamoPlugin(backend="eager").to_kwargs(),
        DistributedDataParallelKwargs(find_unused_parameters=True).to_kwargs(),
        str(InitProcessGroupKwargs(backend="gloo").timeout),
        PrecisionType.list(),
        "fp16" in PrecisionType,
        str(LoggerType.WANDB),
        str(DistributedType.NO),
        DistributedType.NO == "NO",
        ProjectConfiguration("a").logging_dir,
        [str(kind) for kind in RNGType][:2],
    ]


PROCESSES = (1,)
