"""Attributes of Hugging Face Accelerate's Accelerator: values for those that hasten supports, alternatives for the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from hasten.runtime.mesh_plan import Axis

Accelerator = Any
"""The facade; importing its class here would load torch, which `hasten migrate` avoids."""


class DistributedType(StrEnum):
    """Kinds of distributed runs under Accelerate's names; each member equals its name as text."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    MEGATRON_LM = "MEGATRON_LM"
    XLA = "XLA"


_BY_STRATEGY: Final = MappingProxyType(
    {
        "deepspeed": DistributedType.DEEPSPEED,
        "megatron": DistributedType.MEGATRON_LM,
        "xla": DistributedType.XLA,
        "fsdp": DistributedType.FSDP,
        "tensor": DistributedType.FSDP,
    }
)
_BY_DEVICE: Final = MappingProxyType(
    {
        "cpu": DistributedType.MULTI_CPU,
        "npu": DistributedType.MULTI_NPU,
        "xpu": DistributedType.MULTI_XPU,
    }
)


def distributed_type(strategy: str, device: str, num_processes: int) -> DistributedType:
    """Return Accelerate's name for a strategy with this number of processes and type of device."""
    if num_processes == 1 and strategy not in ("deepspeed", "megatron", "xla"):
        return DistributedType.NO
    return _BY_STRATEGY.get(strategy) or _BY_DEVICE.get(device, DistributedType.MULTI_GPU)


def _type_of(accelerator: Accelerator) -> DistributedType:
    return distributed_type(accelerator._strategy.name, accelerator.device.type, accelerator.num_processes)


def _place(axis: Axis) -> Callable[[Accelerator], int]:
    return lambda accelerator: accelerator.ctx.mesh.coordinate(accelerator.process_index)[axis]


VALUES: Final[Mapping[str, Callable[[Accelerator], Any]]] = MappingProxyType(  # Any: values of every kind
    {
        "distributed_type": _type_of,
        "multi_device": lambda a: a.use_distributed and _type_of(a).startswith("MULTI_") and a.device.type != "cpu",
        "is_fsdp2": lambda a: _type_of(a) is DistributedType.FSDP,
        "is_composable_parallelism_enabled": lambda a: _type_of(a) is DistributedType.FSDP,
        "data_parallel_rank": _place(Axis.DP_REPLICATE),
        "data_parallel_shard_rank": _place(Axis.DP_SHARD),
        "tensor_parallel_rank": _place(Axis.TP),
        "pipeline_parallel_rank": _place(Axis.PP),
        "context_parallel_rank": _place(Axis.CP),
        "device_placement": lambda a: a.config.device_placement,
        "step_scheduler_with_optimizer": lambda a: a.config.step_scheduler_with_optimizer,
        "log_with": lambda a: list(a.config.tracking.log_with),
        "logging_dir": lambda a: a.config.project.logging_dir or a.config.project.project_dir,
        "save_iteration": lambda a: a._saving.iteration,
        "should_save_model": lambda a: True,
        "project_configuration": lambda a: a.config.project,
        "parallelism_config": lambda a: a.config.parallelism,
        "deepspeed_plugin": lambda a: a.config.deepspeed if a._strategy.name == "deepspeed" else None,
        "dataloader_config": lambda a: a.config.dataloader,
        "split_batches": lambda a: a.config.dataloader.split_batches,
        "dispatch_batches": lambda a: a.config.dataloader.dispatch_batches,
        "even_batches": lambda a: a.config.dataloader.even_batches,
        "use_seedable_sampler": lambda a: a.config.dataloader.use_seedable_sampler,
        "non_blocking": lambda a: a.config.dataloader.non_blocking,
        "native_amp": lambda a: a.mixed_precision in ("fp16", "bf16"),
        "fp8_enabled": lambda a: a.mixed_precision == "fp8",
    }
)
"""Attributes of Accelerate's Accelerator that hasten supports."""

_HANDLER: Final = "it is a section of the settings: accelerator.config.{}"
INSTEAD: Final[Mapping[str, str]] = MappingProxyType(
    {
        "state": "the Accelerator itself has num_processes, process_index, device, mixed_precision and distributed_type; there is no "
        "process-wide state",
        "gradient_state": "use accelerator.sync_gradients and accelerator.gradient_accumulation_steps; a prepared loader's end is "
        "loader.cursor.at_end",
        "rng_types": "it is accelerator.config.rng_types; by default no generator is synchronised, because shuffles follow a seed",
        "step": "the number of updates is optimizer.num_updates of a prepared optimizer",
        "flag_tensor": "use set_trigger() and check_trigger()",
        "trigger_sync_in_backward": "set accelerator.sync_gradients = True before the backward() that shall synchronise, or use accumulate()",
        "torch_device_mesh": "give the collectives mesh axes (gather(x, axes=[Axis.TP])); the sizes are in accelerator.config.parallelism",
        "verify_device_map": "prepare() leaves a model that is spread over devices where it is; look at its hf_device_map",
        "autocast_handler": _HANDLER.format("autocast"),
        "ddp_handler": _HANDLER.format("ddp"),
        "init_handler": _HANDLER.format("process_group"),
        "profile_handler": _HANDLER.format("profile"),
        "scaler_handler": _HANDLER.format("scaler"),
        "fp8_recipe_handler": _HANDLER.format("fp8"),
        "ao_recipe_handler": _HANDLER.format("fp8.ao"),
        "te_recipe_handler": _HANDLER.format("fp8.te"),
        "fp8_backend": _HANDLER.format("fp8.backend"),
        "has_fp8_handler": 'compare accelerator.mixed_precision == "fp8"; the recipe is accelerator.config.fp8',
        "msamp_recipe_handler": 'MS-AMP is not supported; fp8 runs by torchao or Transformer Engine: kwargs_handlers=[FP8Config(backend="ao")]',
        "delayed_fp8_autocast": "prepare() applies the fp8 recipe; use accelerator.autocast() outside the model",
        "use_stateful_dataloader": "every prepared loader resumes exactly, and has state_dict()",
        "deepspeed_ulysses_dl_adapter": "run forward and backward inside accelerator.context_parallel(...), which splits the sequences",
        "maybe_context_parallel": "write context_parallel(buffers, dims), which weighs each rank's loss by its labels (labels=None: equally)",
        "clear": "write free_memory(...)",
        "lomo_backward": "LOMO is not supported; use an optimizer of torch, with FSDP or offload to save memory",
        "has_lomo_optimizer": "LOMO is not supported; use an optimizer of torch, with FSDP or offload to save memory",
    }
)
"""Attributes of Accelerate's Accelerator that hasten does not have, and their alternatives."""


_GONE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "run_step": "call forward and backward() in the loop; find_executable_batch_size finds a batch size that fits into memory",
        "traffic": "torch.profiler (accelerator.profile()) shows every collective with its bytes",
        "memory_snapshot": "use torch.cuda.memory._dump_snapshot(); an out-of-memory error carries the memory of its rank by use",
    }
)
"""Attributes of earlier versions of hasten, and their alternatives."""


def established(accelerator: Accelerator, name: str) -> Any:  # Any: values of every kind
    """Return an attribute under Accelerate's name. Raises: AttributeError that names the alternative."""
    if (value := VALUES.get(name)) is not None:
        return value(accelerator)
    if (words := INSTEAD.get(name)) is not None:
        raise AttributeError(f"hasten's Accelerator has no {name!r}, which Accelerate's has; {words}.")
    if (words := _GONE.get(name)) is not None:
        raise AttributeError(f"Accelerator.{name} was removed; {words}.")
    raise AttributeError(f"{type(accelerator).__name__!r} object has no attribute {name!r}", name=name, obj=accelerator)
