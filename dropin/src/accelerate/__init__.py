"""The established top-level names of Accelerate 1.15, each loaded on first use."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import Any, Final

from accelerate.conflict import refuse_other_package

__version__ = "1.15.0+hasten"

refuse_other_package()

_MODULES: Final = frozenset(
    [
        "accelerator",
        "big_modeling",
        "checkpointing",
        "commands",
        "data_loader",
        "hooks",
        "inference",
        "launchers",
        "local_sgd",
        "logging",
        "memory_utils",
        "optimizer",
        "parallelism_config",
        "quirks",
        "scheduler",
        "state",
        "test_utils",
        "tracking",
        "utils",
    ]
)
_PUBLIC: Final = MappingProxyType(
    {
        "Accelerator": "accelerate.accelerator",
        "PartialState": "accelerate.state",
        "ParallelismConfig": "accelerate.parallelism_config",
        "skip_first_batches": "accelerate.data_loader",
        "debug_launcher": "accelerate.launchers",
        "notebook_launcher": "accelerate.launchers",
        "prepare_pippy": "accelerate.inference",
        "is_rich_available": "accelerate.utils.imports",
        "find_executable_batch_size": "accelerate.utils.memory",
        "infer_auto_device_map": "accelerate.utils.modeling",
        "load_checkpoint_in_model": "accelerate.utils.modeling",
        "synchronize_rng_states": "accelerate.utils.random",
        **dict.fromkeys(
            (
                "AutocastKwargs",
                "DDPCommunicationHookType",
                "DataLoaderConfiguration",
                "DeepSpeedPlugin",
                "DistributedDataParallelKwargs",
                "DistributedType",
                "FullyShardedDataParallelPlugin",
                "GradScalerKwargs",
                "InitProcessGroupKwargs",
                "ProfileKwargs",
            ),
            "accelerate.utils.dataclasses",
        ),
        **dict.fromkeys(
            (
                "cpu_offload",
                "cpu_offload_with_hook",
                "disk_offload",
                "dispatch_model",
                "init_empty_weights",
                "init_on_device",
                "load_checkpoint_and_dispatch",
            ),
            "accelerate.big_modeling",
        ),
    }
)

__all__ = [*_PUBLIC]  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})


def __getattr__(name: str) -> Any:  # Any: whatever the name stands for
    if name in _MODULES:
        return import_module(f"accelerate.{name}")
    if (module := _PUBLIC.get(name)) is None:
        raise AttributeError(f"module 'accelerate' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value
