"""Public names of hasten, each imported from its module on first use.

`import hasten` costs next to nothing: it imports no torch and no submodule. To add a public name, write one line in
the `TYPE_CHECKING` block (for type checkers and editors) and one in `_PUBLIC` (for the running program), both in
alphabetical order of modules; tests/arch compares the two and the committed snapshot of names.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from hasten.version import __version__

if TYPE_CHECKING:
    from hasten.accelerator.established import DistributedType as DistributedType
    from hasten.accelerator.facade import Accelerator as Accelerator
    from hasten.accelerator.inference import map_dataset as map_dataset
    from hasten.accelerator.inference import prepare_pipeline as prepare_pipeline
    from hasten.accelerator.process import Process as Process
    from hasten.bigmodel.align import AlignDevicesHook as AlignDevicesHook
    from hasten.bigmodel.align import attach_align_device_hook as attach_align_device_hook
    from hasten.bigmodel.align import attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks
    from hasten.bigmodel.align import remove_hook_from_submodules as remove_hook_from_submodules
    from hasten.bigmodel.device_map import check_device_map as check_device_map
    from hasten.bigmodel.device_map import compute_module_sizes as compute_module_sizes
    from hasten.bigmodel.device_map import find_tied_parameters as find_tied_parameters
    from hasten.bigmodel.device_map import get_balanced_memory as get_balanced_memory
    from hasten.bigmodel.device_map import get_max_memory as get_max_memory
    from hasten.bigmodel.device_map import infer_auto_device_map as infer_auto_device_map
    from hasten.bigmodel.device_map import retie_parameters as retie_parameters
    from hasten.bigmodel.dispatch import cpu_offload as cpu_offload
    from hasten.bigmodel.dispatch import cpu_offload_with_hook as cpu_offload_with_hook
    from hasten.bigmodel.dispatch import disk_offload as disk_offload
    from hasten.bigmodel.dispatch import dispatch_model as dispatch_model
    from hasten.bigmodel.load import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
    from hasten.bigmodel.load import load_checkpoint_in_model as load_checkpoint_in_model
    from hasten.bigmodel.meta import init_empty_weights as init_empty_weights
    from hasten.bigmodel.meta import init_on_device as init_on_device
    from hasten.bigmodel.offload_files import OffloadedWeightsLoader as OffloadedWeightsLoader
    from hasten.bigmodel.offload_files import offload_state_dict as offload_state_dict
    from hasten.bigmodel.quantize import quantize_weights as quantize_weights
    from hasten.bigmodel.tensors import align_module_device as align_module_device
    from hasten.bigmodel.tensors import attach_layerwise_casting_hooks as attach_layerwise_casting_hooks
    from hasten.bigmodel.tensors import has_offloaded_params as has_offloaded_params
    from hasten.bigmodel.tensors import set_module_tensor_to_device as set_module_tensor_to_device
    from hasten.checkpoint.state_dicts import LoadReport as LoadReport
    from hasten.cli.config_cmd import write_basic_config as write_basic_config
    from hasten.config.legacy import fsdp_from_fsdp1 as fsdp_from_fsdp1
    from hasten.config.root import Config as Config
    from hasten.config.sections.engines import DeepSpeedPlugin as DeepSpeedPlugin
    from hasten.config.sections.engines import MegatronLMPlugin as MegatronLMPlugin
    from hasten.config.sections.engines import XLAConfig as XLAConfig
    from hasten.config.sections.launch import InitProcessGroupKwargs as InitProcessGroupKwargs
    from hasten.config.sections.launch import LaunchConfig as LaunchConfig
    from hasten.config.sections.loop import AORecipeKwargs as AORecipeKwargs
    from hasten.config.sections.loop import AutocastKwargs as AutocastKwargs
    from hasten.config.sections.loop import DataLoaderConfiguration as DataLoaderConfiguration
    from hasten.config.sections.loop import FP8Config as FP8Config
    from hasten.config.sections.loop import GradientAccumulationPlugin as GradientAccumulationPlugin
    from hasten.config.sections.loop import GradScalerKwargs as GradScalerKwargs
    from hasten.config.sections.loop import PerformanceSettings as PerformanceSettings
    from hasten.config.sections.loop import ProfileKwargs as ProfileKwargs
    from hasten.config.sections.loop import ProjectConfiguration as ProjectConfiguration
    from hasten.config.sections.loop import TERecipeKwargs as TERecipeKwargs
    from hasten.config.sections.loop import TorchDynamoPlugin as TorchDynamoPlugin
    from hasten.config.sections.loop import TrackingConfig as TrackingConfig
    from hasten.config.sections.parallel import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
    from hasten.config.sections.parallel import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from hasten.config.sections.parallel import FSDPMixedPrecision as FSDPMixedPrecision
    from hasten.config.sections.parallel import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from hasten.config.sections.parallel import ParallelismConfig as ParallelismConfig
    from hasten.config.sections.parallel import PipelineParallelConfig as PipelineParallelConfig
    from hasten.config.sections.parallel import TorchContextParallelConfig as TorchContextParallelConfig
    from hasten.config.sections.parallel import TorchTensorParallelConfig as TorchTensorParallelConfig
    from hasten.data.loader import skip_first_batches as skip_first_batches
    from hasten.errors import HastenError as HastenError
    from hasten.errors import HastenWarning as HastenWarning
    from hasten.launch.notebook import debug_launcher as debug_launcher
    from hasten.launch.notebook import notebook_launcher as notebook_launcher
    from hasten.modules.hooks import LayerwiseCastingHook as LayerwiseCastingHook
    from hasten.modules.hooks import ModelHook as ModelHook
    from hasten.modules.hooks import SequentialHook as SequentialHook
    from hasten.modules.hooks import add_hook_to_module as add_hook_to_module
    from hasten.modules.hooks import remove_hook_from_module as remove_hook_from_module
    from hasten.optim.batch_size import find_executable_batch_size as find_executable_batch_size
    from hasten.optim.engine import DummyOptim as DummyOptim
    from hasten.optim.engine import DummyScheduler as DummyScheduler
    from hasten.optim.local_sgd import LocalSGD as LocalSGD
    from hasten.optim.optimizer import PreparedOptimizer as PreparedOptimizer
    from hasten.optim.scheduler import PreparedScheduler as PreparedScheduler
    from hasten.precision.base import StepResult as StepResult
    from hasten.progress.bar import Progress as Progress
    from hasten.progress.tqdm_bar import tqdm as tqdm
    from hasten.runtime.context import ProcessContext as ProcessContext
    from hasten.runtime.logs import get_logger as get_logger
    from hasten.runtime.mesh_plan import Axis as Axis
    from hasten.runtime.seeding import set_seed as set_seed
    from hasten.runtime.seeding import synchronize_rng_states as synchronize_rng_states
    from hasten.state.preemption import PREEMPTED_EXIT_CODE as PREEMPTED_EXIT_CODE
    from hasten.strategies.base import Caps as Caps
    from hasten.strategies.base import Stage as Stage
    from hasten.strategies.base import Strategy as Strategy
    from hasten.strategies.base import Transform as Transform
    from hasten.strategies.base import Wish as Wish
    from hasten.strategies.pipeline.cut import balanced_split_points as balanced_split_points
    from hasten.testing.pool import Pool as Pool
    from hasten.testing.pool import ranks as ranks
    from hasten.tracking.backends.jsonl import read_metrics as read_metrics
    from hasten.tracking.base import Entry as Entry
    from hasten.tracking.base import Run as Run
    from hasten.tracking.base import Tracker as Tracker
    from hasten.trainer.arguments import TrainingArguments as TrainingArguments
    from hasten.trainer.callbacks import EarlyStoppingCallback as EarlyStoppingCallback
    from hasten.trainer.callbacks import ProgressCallback as ProgressCallback
    from hasten.trainer.callbacks import TrainerCallback as TrainerCallback
    from hasten.trainer.collate import DataCollatorWithPadding as DataCollatorWithPadding
    from hasten.trainer.collate import default_data_collator as default_data_collator
    from hasten.trainer.evaluation import EvalPrediction as EvalPrediction
    from hasten.trainer.evaluation import PredictionOutput as PredictionOutput
    from hasten.trainer.loop import TrainOutput as TrainOutput
    from hasten.trainer.metrics import causal_lm_metrics as causal_lm_metrics
    from hasten.trainer.metrics import classification_metrics as classification_metrics
    from hasten.trainer.metrics import token_classification_metrics as token_classification_metrics
    from hasten.trainer.schedules import get_scheduler as get_scheduler
    from hasten.trainer.state import TrainerControl as TrainerControl
    from hasten.trainer.state import TrainerState as TrainerState
    from hasten.trainer.trainer import Trainer as Trainer

# public name -> the module that defines it
_PUBLIC: Final = MappingProxyType[str, str](
    {
        "DistributedType": "hasten.accelerator.established",
        "Accelerator": "hasten.accelerator.facade",
        "map_dataset": "hasten.accelerator.inference",
        "prepare_pipeline": "hasten.accelerator.inference",
        "PREEMPTED_EXIT_CODE": "hasten.state.preemption",
        "Process": "hasten.accelerator.process",
        "AlignDevicesHook": "hasten.bigmodel.align",
        "attach_align_device_hook": "hasten.bigmodel.align",
        "attach_align_device_hook_on_blocks": "hasten.bigmodel.align",
        "remove_hook_from_submodules": "hasten.bigmodel.align",
        "get_max_memory": "hasten.bigmodel.device_map",
        "attach_layerwise_casting_hooks": "hasten.bigmodel.tensors",
        "check_device_map": "hasten.bigmodel.device_map",
        "compute_module_sizes": "hasten.bigmodel.device_map",
        "get_balanced_memory": "hasten.bigmodel.device_map",
        "infer_auto_device_map": "hasten.bigmodel.device_map",
        "cpu_offload": "hasten.bigmodel.dispatch",
        "disk_offload": "hasten.bigmodel.dispatch",
        "dispatch_model": "hasten.bigmodel.dispatch",
        "load_checkpoint_and_dispatch": "hasten.bigmodel.load",
        "load_checkpoint_in_model": "hasten.bigmodel.load",
        "init_empty_weights": "hasten.bigmodel.meta",
        "init_on_device": "hasten.bigmodel.meta",
        "OffloadedWeightsLoader": "hasten.bigmodel.offload_files",
        "offload_state_dict": "hasten.bigmodel.offload_files",
        "quantize_weights": "hasten.bigmodel.quantize",
        "align_module_device": "hasten.bigmodel.tensors",
        "has_offloaded_params": "hasten.bigmodel.tensors",
        "set_module_tensor_to_device": "hasten.bigmodel.tensors",
        "find_tied_parameters": "hasten.bigmodel.device_map",
        "retie_parameters": "hasten.bigmodel.device_map",
        "cpu_offload_with_hook": "hasten.bigmodel.dispatch",
        "LoadReport": "hasten.checkpoint.state_dicts",
        "write_basic_config": "hasten.cli.config_cmd",
        "ProjectConfiguration": "hasten.config.sections.loop",
        "TorchDynamoPlugin": "hasten.config.sections.loop",
        "DataLoaderConfiguration": "hasten.config.sections.loop",
        "DeepSpeedPlugin": "hasten.config.sections.engines",
        "MegatronLMPlugin": "hasten.config.sections.engines",
        "XLAConfig": "hasten.config.sections.engines",
        "InitProcessGroupKwargs": "hasten.config.sections.launch",
        "LaunchConfig": "hasten.config.sections.launch",
        "fsdp_from_fsdp1": "hasten.config.legacy",
        "GradientAccumulationPlugin": "hasten.config.sections.loop",
        "DeepSpeedSequenceParallelConfig": "hasten.config.sections.parallel",
        "DistributedDataParallelKwargs": "hasten.config.sections.parallel",
        "ParallelismConfig": "hasten.config.sections.parallel",
        "PipelineParallelConfig": "hasten.config.sections.parallel",
        "TorchContextParallelConfig": "hasten.config.sections.parallel",
        "TorchTensorParallelConfig": "hasten.config.sections.parallel",
        "PerformanceSettings": "hasten.config.sections.loop",
        "AORecipeKwargs": "hasten.config.sections.loop",
        "AutocastKwargs": "hasten.config.sections.loop",
        "FP8Config": "hasten.config.sections.loop",
        "GradScalerKwargs": "hasten.config.sections.loop",
        "TERecipeKwargs": "hasten.config.sections.loop",
        "Config": "hasten.config.root",
        "FSDPMixedPrecision": "hasten.config.sections.parallel",
        "FullyShardedDataParallelPlugin": "hasten.config.sections.parallel",
        "ProfileKwargs": "hasten.config.sections.loop",
        "TrackingConfig": "hasten.config.sections.loop",
        "skip_first_batches": "hasten.data.loader",
        "HastenError": "hasten.errors",
        "HastenWarning": "hasten.errors",
        "debug_launcher": "hasten.launch.notebook",
        "notebook_launcher": "hasten.launch.notebook",
        "LayerwiseCastingHook": "hasten.modules.hooks",
        "ModelHook": "hasten.modules.hooks",
        "SequentialHook": "hasten.modules.hooks",
        "add_hook_to_module": "hasten.modules.hooks",
        "remove_hook_from_module": "hasten.modules.hooks",
        "find_executable_batch_size": "hasten.optim.batch_size",
        "DummyOptim": "hasten.optim.engine",
        "DummyScheduler": "hasten.optim.engine",
        "LocalSGD": "hasten.optim.local_sgd",
        "PreparedOptimizer": "hasten.optim.optimizer",
        "PreparedScheduler": "hasten.optim.scheduler",
        "StepResult": "hasten.precision.base",
        "Progress": "hasten.progress.bar",
        "tqdm": "hasten.progress.tqdm_bar",
        "Axis": "hasten.runtime.mesh_plan",
        "ProcessContext": "hasten.runtime.context",
        "get_logger": "hasten.runtime.logs",
        "set_seed": "hasten.runtime.seeding",
        "synchronize_rng_states": "hasten.runtime.seeding",
        "Caps": "hasten.strategies.base",
        "Stage": "hasten.strategies.base",
        "Strategy": "hasten.strategies.base",
        "Transform": "hasten.strategies.base",
        "Wish": "hasten.strategies.base",
        "balanced_split_points": "hasten.strategies.pipeline.cut",
        "Pool": "hasten.testing.pool",
        "ranks": "hasten.testing.pool",
        "read_metrics": "hasten.tracking.backends.jsonl",
        "Entry": "hasten.tracking.base",
        "Run": "hasten.tracking.base",
        "Tracker": "hasten.tracking.base",
        "TrainingArguments": "hasten.trainer.arguments",
        "EarlyStoppingCallback": "hasten.trainer.callbacks",
        "ProgressCallback": "hasten.trainer.callbacks",
        "TrainerCallback": "hasten.trainer.callbacks",
        "DataCollatorWithPadding": "hasten.trainer.collate",
        "default_data_collator": "hasten.trainer.collate",
        "EvalPrediction": "hasten.trainer.evaluation",
        "PredictionOutput": "hasten.trainer.evaluation",
        "TrainOutput": "hasten.trainer.loop",
        "causal_lm_metrics": "hasten.trainer.metrics",
        "classification_metrics": "hasten.trainer.metrics",
        "token_classification_metrics": "hasten.trainer.metrics",
        "get_scheduler": "hasten.trainer.schedules",
        "TrainerControl": "hasten.trainer.state",
        "TrainerState": "hasten.trainer.state",
        "Trainer": "hasten.trainer.trainer",
    }
)

__all__ = ["__version__", *_PUBLIC]  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    """Return every public name, loaded or not."""
    return sorted(__all__)


if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any attribute

    def __getattr__(name: str) -> object:
        """Import the module that defines `name` and cache the attribute for later accesses."""
        if (module := _PUBLIC.get(name)) is None:
            raise AttributeError(
                f"module 'hasten' has no attribute {name!r}; public names are listed in hasten.__all__"
            )
        value = getattr(import_module(module), name)
        globals()[name] = value
        return value
