"""The established top-level names of Accelerate 1.15, each loaded on first use."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from accelerate._impl.surface.conflict import refuse_other_package
from accelerate._impl.surface.lazy import lazy

__version__ = "1.15.0+hasten"

refuse_other_package()

_HOMES: Final = MappingProxyType(
    {
        "": (
            "accelerator big_modeling checkpointing commands data_loader hooks inference launchers local_sgd logging memory_utils optimizer parallelism_config scheduler state test_utils tracking utils"
        ),
        "accelerate.accelerator": "Accelerator",
        "accelerate.big_modeling": (
            "cpu_offload cpu_offload_with_hook disk_offload dispatch_model init_empty_weights init_on_device load_checkpoint_and_dispatch"
        ),
        "accelerate.data_loader": "skip_first_batches",
        "accelerate.inference": "prepare_pippy",
        "accelerate.launchers": "debug_launcher notebook_launcher",
        "accelerate.parallelism_config": "ParallelismConfig",
        "accelerate.state": "PartialState",
        "accelerate.utils.dataclasses": (
            "AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin DistributedDataParallelKwargs DistributedType FullyShardedDataParallelPlugin GradScalerKwargs InitProcessGroupKwargs ProfileKwargs"
        ),
        "accelerate.utils.imports": "is_rich_available",
        "accelerate.utils.memory": "find_executable_batch_size",
        "accelerate.utils.modeling": "infer_auto_device_map load_checkpoint_in_model",
        "accelerate.utils.random": "synchronize_rng_states",
    }
)
__all__ = [name for home, names in _HOMES.items() if home for name in names.split()]  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__, __dir__ = lazy(__name__, _HOMES)
