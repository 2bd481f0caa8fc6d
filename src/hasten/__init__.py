"""Public names of hasten, each imported from its module on first use.

`import hasten` costs next to nothing: it imports no torch. Here is what most training scripts import; more is in the public modules
`hasten.bigmodel`, `hasten.data`, `hasten.errors`, `hasten.extending`, `hasten.ray`, `hasten.testing` and `hasten.trainer`. To add a
public name, write one line in the `TYPE_CHECKING` block (for type checkers and editors) and one in `_PUBLIC` (for the running program), both
in alphabetical order of modules; tests/arch compares the two and the committed snapshot of names.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from hasten.lazy import exports
from hasten.version import __version__

if TYPE_CHECKING:
    from hasten import data as data
    from hasten import errors as errors
    from hasten import extending as extending
    from hasten import testing as testing
    from hasten.accelerator.facade import Accelerator as Accelerator
    from hasten.accelerator.inference import map_dataset as map_dataset
    from hasten.accelerator.process import Process as Process
    from hasten.config.legacy import fsdp_from_fsdp1 as fsdp_from_fsdp1
    from hasten.config.sections.launch import (
        InitProcessGroupKwargs as InitProcessGroupKwargs,
    )
    from hasten.config.sections.loop import AORecipeKwargs as AORecipeKwargs
    from hasten.config.sections.loop import AutocastKwargs as AutocastKwargs
    from hasten.config.sections.loop import (
        DataLoaderConfiguration as DataLoaderConfiguration,
    )
    from hasten.config.sections.loop import FP8Config as FP8Config
    from hasten.config.sections.loop import (
        GradientAccumulationPlugin as GradientAccumulationPlugin,
    )
    from hasten.config.sections.loop import GradScalerKwargs as GradScalerKwargs
    from hasten.config.sections.loop import PerformanceSettings as PerformanceSettings
    from hasten.config.sections.loop import ProfileKwargs as ProfileKwargs
    from hasten.config.sections.loop import ProjectConfiguration as ProjectConfiguration
    from hasten.config.sections.loop import TERecipeKwargs as TERecipeKwargs
    from hasten.config.sections.loop import TorchDynamoPlugin as TorchDynamoPlugin
    from hasten.config.sections.loop import TrackingConfig as TrackingConfig
    from hasten.config.sections.parallel import (
        DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
    )
    from hasten.config.sections.parallel import (
        DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    )
    from hasten.config.sections.parallel import FSDPMixedPrecision as FSDPMixedPrecision
    from hasten.config.sections.parallel import (
        FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
    )
    from hasten.config.sections.parallel import ParallelismConfig as ParallelismConfig
    from hasten.config.sections.parallel import (
        PipelineParallelConfig as PipelineParallelConfig,
    )
    from hasten.config.sections.parallel import (
        TorchContextParallelConfig as TorchContextParallelConfig,
    )
    from hasten.config.sections.parallel import (
        TorchTensorParallelConfig as TorchTensorParallelConfig,
    )
    from hasten.config.sections.trust import TrustSettings as TrustSettings
    from hasten.data.skipping import skip_first_batches as skip_first_batches
    from hasten.errors import HastenError as HastenError
    from hasten.errors import HastenWarning as HastenWarning
    from hasten.extensions.public import *  # noqa: F403  # the names of bundled extensions
    from hasten.launch.notebook import debug_launcher as debug_launcher
    from hasten.launch.notebook import notebook_launcher as notebook_launcher
    from hasten.modules.meta import init_empty_weights as init_empty_weights
    from hasten.optim.batch_size import (
        find_executable_batch_size as find_executable_batch_size,
    )
    from hasten.progress.tqdm_bar import tqdm as tqdm
    from hasten.runtime.logs import get_logger as get_logger
    from hasten.runtime.seeding import set_seed as set_seed
    from hasten.runtime.seeding import synchronize_rng_states as synchronize_rng_states
    from hasten.state.preemption import PREEMPTED_EXIT_CODE as PREEMPTED_EXIT_CODE
    from hasten.tracking.jsonl import read_metrics as read_metrics

# public name -> the module that defines it
_PUBLIC: Final = MappingProxyType[str, str](
    {
        "Accelerator": "hasten.accelerator.facade",
        "map_dataset": "hasten.accelerator.inference",
        "Process": "hasten.accelerator.process",
        "init_empty_weights": "hasten.modules.meta",
        "fsdp_from_fsdp1": "hasten.config.legacy",
        "InitProcessGroupKwargs": "hasten.config.sections.launch",
        "AORecipeKwargs": "hasten.config.sections.loop",
        "AutocastKwargs": "hasten.config.sections.loop",
        "DataLoaderConfiguration": "hasten.config.sections.loop",
        "FP8Config": "hasten.config.sections.loop",
        "GradScalerKwargs": "hasten.config.sections.loop",
        "GradientAccumulationPlugin": "hasten.config.sections.loop",
        "PerformanceSettings": "hasten.config.sections.loop",
        "ProfileKwargs": "hasten.config.sections.loop",
        "ProjectConfiguration": "hasten.config.sections.loop",
        "TERecipeKwargs": "hasten.config.sections.loop",
        "TorchDynamoPlugin": "hasten.config.sections.loop",
        "TrackingConfig": "hasten.config.sections.loop",
        "DeepSpeedSequenceParallelConfig": "hasten.config.sections.parallel",
        "DistributedDataParallelKwargs": "hasten.config.sections.parallel",
        "FSDPMixedPrecision": "hasten.config.sections.parallel",
        "FullyShardedDataParallelPlugin": "hasten.config.sections.parallel",
        "ParallelismConfig": "hasten.config.sections.parallel",
        "PipelineParallelConfig": "hasten.config.sections.parallel",
        "TorchContextParallelConfig": "hasten.config.sections.parallel",
        "TorchTensorParallelConfig": "hasten.config.sections.parallel",
        "TrustSettings": "hasten.config.sections.trust",
        "skip_first_batches": "hasten.data.skipping",
        "HastenError": "hasten.errors",
        "HastenWarning": "hasten.errors",
        "debug_launcher": "hasten.launch.notebook",
        "notebook_launcher": "hasten.launch.notebook",
        "find_executable_batch_size": "hasten.optim.batch_size",
        "tqdm": "hasten.progress.tqdm_bar",
        "get_logger": "hasten.runtime.logs",
        "set_seed": "hasten.runtime.seeding",
        "synchronize_rng_states": "hasten.runtime.seeding",
        "PREEMPTED_EXIT_CODE": "hasten.state.preemption",
        "read_metrics": "hasten.tracking.jsonl",
    }
)

_MODULES: Final = ("data", "errors", "extending", "testing")
"""Public modules, imported on first use as well."""

__all__ = ["__version__", *_PUBLIC]  # pyright: ignore[reportUnsupportedDunderAll]

# hidden from type checkers, which would otherwise accept any attribute
if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(__name__, _PUBLIC, _MODULES, extensible=True)
