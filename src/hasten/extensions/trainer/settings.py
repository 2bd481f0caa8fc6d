"""Settings of the Accelerator from TrainingArguments; arguments at their default are left to flags, environment and files."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from hasten.config.legacy import fsdp_from_fsdp1
from hasten.config.sections.loop import (
    DataLoaderConfiguration,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from hasten.config.sections.parallel import DistributedDataParallelKwargs
from hasten.errors import ConfigError, SettingValueError
from hasten.extensions.trainer.arguments import TrainingArguments
from hasten.strategies.blocks import repeated_blocks

_FSDP_WORDS: Final = (
    "full_shard",
    "shard_grad_op",
    "hybrid_shard",
    "hybrid_shard_zero2",
    "offload",
    "auto_wrap",
)


# Any: settings of every type
def accelerator_settings(args: TrainingArguments, model: nn.Module) -> dict[str, Any]:
    """Return the keyword arguments of the Accelerator for these arguments.

    Raises: ConfigError for a value that the Accelerator does not support.
    """
    accelerator_options: dict[str, Any] = {
        "project_config": _project_settings(args),
        "dataloader_config": _loader_settings(args),
    }
    # the curves of `hasten report`
    accelerator_options["log_with"] = list(dict.fromkeys(["jsonl", *args.trackers]))
    if args.bf16 or args.fp16:
        accelerator_options["mixed_precision"] = "bf16" if args.bf16 else "fp16"
    if args.gradient_accumulation_steps > 1:
        accelerator_options["gradient_accumulation_steps"] = (
            args.gradient_accumulation_steps
        )
    if args.use_cpu:
        accelerator_options["cpu"] = True
    if args.torch_compile or args.torch_compile_backend or args.torch_compile_mode:
        accelerator_options["dynamo_plugin"] = TorchDynamoPlugin(
            backend=args.torch_compile_backend or "inductor",
            mode=args.torch_compile_mode or "default",  # type: ignore[arg-type]  # checked by the plugin
        )
    if args.fsdp:
        accelerator_options |= {"strategy": "fsdp", "fsdp_plugin": _fsdp_settings(args)}
    elif args.fsdp_config:
        raise ConfigError(
            "fsdp_config was given without fsdp, so nothing would be sharded; set fsdp='full_shard'."
        )
    if args.deepspeed:
        accelerator_options |= {
            "strategy": "deepspeed",
            "deepspeed_plugin": {"hf_ds_config": args.deepspeed},
        }
    if args.gradient_checkpointing and not hasattr(
        model, "gradient_checkpointing_enable"
    ):
        accelerator_options["recompute"] = _recomputed_blocks(model)
    if args.ddp_find_unused_parameters is not None:
        accelerator_options["kwargs_handlers"] = [
            DistributedDataParallelKwargs(
                find_unused_parameters=args.ddp_find_unused_parameters
            )
        ]
    return accelerator_options


def _project_settings(args: TrainingArguments) -> ProjectConfiguration:
    needs_best = args.load_best_model_at_end or args.save_strategy == "best"
    project_settings: dict[str, Any] = {"project_dir": args.output_dir}
    if args.logging_dir is not None:
        project_settings["logging_dir"] = args.logging_dir
    if args.save_total_limit is not None:
        project_settings["total_limit"] = args.save_total_limit
        if needs_best:
            best_mode = "max" if args.larger_is_better else "min"
            project_settings |= {
                "keep_best": 1,
                "best_metric": args.best_metric,
                "best_mode": best_mode,
            }
    return ProjectConfiguration(**project_settings)


def _loader_settings(args: TrainingArguments) -> DataLoaderConfiguration:
    loader_settings: dict[str, Any] = {
        "data_seed": args.seed if args.data_seed is None else args.data_seed
    }
    if args.dataloader_pin_memory is not None:
        loader_settings["pin_memory"] = args.dataloader_pin_memory
    return DataLoaderConfiguration(**loader_settings)


def _fsdp_settings(args: TrainingArguments) -> Any:  # Any: the plugin's class
    if isinstance(args.fsdp, str):
        fsdp_words = args.fsdp.split()
    elif isinstance(args.fsdp, bool):
        fsdp_words = []
    else:
        fsdp_words = list(args.fsdp)
    for fsdp_word in fsdp_words:
        if fsdp_word not in _FSDP_WORDS:
            raise SettingValueError(
                f"fsdp={args.fsdp!r}: {fsdp_word!r} is not a known value; use {', '.join(_FSDP_WORDS)}."
            )
    fsdp_options: dict[str, Any] = {}
    for fsdp_word in reversed(fsdp_words):
        if fsdp_word.startswith(("full", "shard", "hybrid")):
            fsdp_options["sharding_strategy"] = fsdp_word.upper()
    if "offload" in fsdp_words:
        fsdp_options["offload_params"] = True
    return fsdp_from_fsdp1({**fsdp_options, **(args.fsdp_config or {})})[0]


def _recomputed_blocks(model: nn.Module) -> tuple[str, ...]:
    block_classes = {type(block).__name__ for _, block in repeated_blocks(model)}
    if not block_classes:
        raise ConfigError(
            f"gradient_checkpointing=True: {type(model).__name__} has no repeated block to recompute, so it would have no effect; "
            "remove it, or launch with recompute set to the classes of its blocks."
        )
    return tuple(sorted(block_classes))
