"""What to write in place of attributes of Hugging Face Accelerate's objects that hasten's do not have."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_SECTION: Final = "it is in the settings: accelerator.config.{}"
_PROCESS: Final = "use accelerator.process.{}"
INSTEAD: Final[Mapping[str, str]] = MappingProxyType(
    {
        "distributed_type": "accelerator.strategy is the name of the strategy, and accelerator.num_processes the number of processes",
        "multi_device": "compare accelerator.num_processes",
        "is_fsdp2": "compare accelerator.strategy",
        "is_composable_parallelism_enabled": "compare accelerator.strategy",
        "data_parallel_rank": "use accelerator.ctx.mesh.coordinate(accelerator.process_index)",
        "data_parallel_shard_rank": "use accelerator.ctx.mesh.coordinate(accelerator.process_index)",
        "tensor_parallel_rank": "use accelerator.ctx.mesh.coordinate(accelerator.process_index)",
        "pipeline_parallel_rank": "use accelerator.ctx.mesh.coordinate(accelerator.process_index)",
        "context_parallel_rank": "use accelerator.ctx.mesh.coordinate(accelerator.process_index)",
        "device_placement": _SECTION.format("device_placement"),
        "step_scheduler_with_optimizer": _SECTION.format(
            "step_scheduler_with_optimizer"
        ),
        "log_with": _SECTION.format("tracking.log_with"),
        "logging_dir": _SECTION.format("project.logging_dir"),
        "project_dir": _SECTION.format("project.project_dir"),
        "save_iteration": "checkpoints are numbered by their folders",
        "should_save_model": "hasten's saves write what is needed on every rank",
        "project_configuration": _SECTION.format("project"),
        "parallelism_config": _SECTION.format("parallelism"),
        "deepspeed_plugin": _SECTION.format("deepspeed"),
        "dataloader_config": _SECTION.format("dataloader"),
        "split_batches": _SECTION.format("dataloader.split_batches"),
        "dispatch_batches": _SECTION.format("dataloader.dispatch_batches"),
        "even_batches": _SECTION.format("dataloader.even_batches"),
        "use_seedable_sampler": _SECTION.format("dataloader.use_seedable_sampler"),
        "non_blocking": _SECTION.format("dataloader.non_blocking"),
        "native_amp": "compare accelerator.mixed_precision",
        "fp8_enabled": "compare accelerator.mixed_precision",
        "scaler": "fp16 scales losses inside backward(); optimizer.step_was_skipped tells of an overflow",
        "use_distributed": "compare accelerator.num_processes",
        "is_last_process": _PROCESS.format("is_last_process"),
        "on_last_process": _PROCESS.format("on_last_process"),
        "on_process": _PROCESS.format("on_process"),
        "on_local_process": _PROCESS.format("on_local_process"),
        "on_local_main_process": _PROCESS.format("on_local_main_process"),
        "local_main_process_first": _PROCESS.format("local_main_process_first"),
        "prepare_optimizer": "use prepare()",
        "prepare_scheduler": "use prepare()",
        "skip_first_batches": "use hasten.skip_first_batches(loader, n)",
        "state": "the Accelerator itself has num_processes, process_index, device, mixed_precision and strategy; there is no "
        "process-wide state",
        "gradient_state": "use accelerator.sync_gradients and accelerator.gradient_accumulation_steps; a prepared loader's end is "
        "loader.cursor.at_end",
        "rng_types": "it is accelerator.config.rng_types; by default no generator is synchronised, because shuffles follow a seed",
        "step": "the number of updates is optimizer.num_updates of a prepared optimizer",
        "flag_tensor": "use set_trigger() and check_trigger()",
        "trigger_sync_in_backward": "set accelerator.sync_gradients = True before the backward() that shall synchronise, or use accumulate()",
        "torch_device_mesh": "give the collectives mesh axes (gather(x, axes=[Axis.TP])); the sizes are in accelerator.config.parallelism",
        "verify_device_map": "prepare() leaves a model that is spread over devices where it is; look at its hf_device_map",
        "autocast_handler": _SECTION.format("autocast"),
        "ddp_handler": _SECTION.format("ddp"),
        "init_handler": _SECTION.format("process_group"),
        "profile_handler": _SECTION.format("profile"),
        "scaler_handler": _SECTION.format("scaler"),
        "fp8_recipe_handler": _SECTION.format("fp8"),
        "ao_recipe_handler": _SECTION.format("fp8.ao"),
        "te_recipe_handler": _SECTION.format("fp8.te"),
        "fp8_backend": _SECTION.format("fp8.backend"),
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
"""Attributes of Accelerate's Accelerator that hasten's does not have, and their alternatives."""

_SIZES: Final = "multiply the sizes that you need: dp_replicate_size, dp_shard_size, tp_size, cp_size"
_MESH: Final = "the mesh is made with the Accelerator; give the collectives mesh axes (gather(x, axes=[Axis.TP]))"
_ENABLED: Final = "compare the size with 1"
_HANDLER: Final = "the settings are its fields"
OF_OTHER_OBJECTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("total_size", "data_parallel_size", "non_data_parallel_size"), _SIZES
        ),
        **dict.fromkeys(
            ("build_device_mesh", "get_device_mesh", "active_mesh_dims"), _MESH
        ),
        **dict.fromkeys(
            ("dp_dim_names", "non_dp_dim_names", "dp_shard_cp_dim_names"), _MESH
        ),
        **dict.fromkeys(("dp_cp_dim_names", "fsdp_dim_names"), _MESH),
        **dict.fromkeys(
            (
                "dp_replicate_enabled",
                "dp_shard_enabled",
                "tp_enabled",
                "cp_enabled",
                "sp_enabled",
            ),
            _ENABLED,
        ),
        "to_kwargs": _HANDLER,
        "deepspeed_config": "hf_ds_config is what was given; hasten fills it when the engine is created",
        "deepspeed_config_process": "hasten fills the configuration when the engine is created",
        "hf_device_map": "dispatch_model leaves no map on the model; use the one you gave it",
    }
)
"""Attributes of Accelerate's settings and models that hasten's do not have, and their alternatives."""
