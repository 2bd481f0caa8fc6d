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
    settings: dict[str, Any] = {
        "project_config": _project(args),
        "dataloader_config": _data(args),
    }
    # the curves of `hasten report`
    settings["log_with"] = list(dict.fromkeys(["jsonl", *args.trackers]))
    if args.bf16 or args.fp16:
        settings["mixed_precision"] = "bf16" if args.bf16 else "fp16"
    if args.gradient_accumulation_steps > 1:
        settings["gradient_accumulation_steps"] = args.gradient_accumulation_steps
    if args.use_cpu:
        settings["cpu"] = True
    if args.torch_compile or args.torch_compile_backend or args.torch_compile_mode:
        settings["dynamo_plugin"] = TorchDynamoPlugin(
            backend=args.torch_compile_backend or "inductor",
            mode=args.torch_compile_mode or "default",  # type: ignore[arg-type]  # checked by the plugin
        )
    if args.fsdp:
        settings |= {"strategy": "fsdp", "fsdp_plugin": _fsdp(args)}
    elif args.fsdp_config:
        raise ConfigError(
            "fsdp_config was given without fsdp, so nothing would be sharded; set fsdp='full_shard'."
        )
    if args.deepspeed:
        settings |= {
            "strategy": "deepspeed",
            "deepspeed_plugin": {"hf_ds_config": args.deepspeed},
        }
    if args.gradient_checkpointing and not hasattr(
        model, "gradient_checkpointing_enable"
    ):
        settings["recompute"] = _recompute(model)
    if args.ddp_find_unused_parameters is not None:
        settings["kwargs_handlers"] = [
            DistributedDataParallelKwargs(
                find_unused_parameters=args.ddp_find_unused_parameters
            )
        ]
    return settings


def _project(args: TrainingArguments) -> ProjectConfiguration:
    best = args.load_best_model_at_end or args.save_strategy == "best"
    project_settings: dict[str, Any] = {"project_dir": args.output_dir}
    if args.logging_dir is not None:
        project_settings["logging_dir"] = args.logging_dir
    if args.save_total_limit is not None:
        project_settings["total_limit"] = args.save_total_limit
        if best:
            mode = "max" if args.larger_is_better else "min"
            project_settings |= {
                "keep_best": 1,
                "best_metric": args.best_metric,
                "best_mode": mode,
            }
    return ProjectConfiguration(**project_settings)


def _data(args: TrainingArguments) -> DataLoaderConfiguration:
    loader_settings: dict[str, Any] = {
        "data_seed": args.seed if args.data_seed is None else args.data_seed
    }
    if args.dataloader_pin_memory is not None:
        loader_settings["pin_memory"] = args.dataloader_pin_memory
    return DataLoaderConfiguration(**loader_settings)


def _fsdp(args: TrainingArguments) -> Any:  # Any: the plugin's class
    words = (
        args.fsdp.split()
        if isinstance(args.fsdp, str)
        else []
        if isinstance(args.fsdp, bool)
        else list(args.fsdp)
    )
    for word in words:
        if word not in _FSDP_WORDS:
            raise SettingValueError(
                f"fsdp={args.fsdp!r}: {word!r} is not a known value; use {', '.join(_FSDP_WORDS)}."
            )
    options: dict[str, Any] = {}
    if strategy := next(
        (word for word in words if word.startswith(("full", "shard", "hybrid"))), None
    ):
        options["sharding_strategy"] = strategy.upper()
    if "offload" in words:
        options["offload_params"] = True
    return fsdp_from_fsdp1({**options, **(args.fsdp_config or {})})[0]


def _recompute(model: nn.Module) -> tuple[str, ...]:
    names = {type(block).__name__ for _, block in repeated_blocks(model)}
    if not names:
        raise ConfigError(
            f"gradient_checkpointing=True: {type(model).__name__} has no repeated block to recompute, so it would have no effect; "
            "remove it, or launch with recompute set to the classes of its blocks."
        )
    return tuple(sorted(names))
