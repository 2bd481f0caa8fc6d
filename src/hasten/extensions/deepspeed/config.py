"""Translation of the settings into DeepSpeed's configuration; pure: "auto" values are filled and choices are noted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hasten.errors import ConfigError
from hasten.extensions.deepspeed.settings import DeepSpeedPlugin

# Any in this file: DeepSpeed's keys and values.


AUTO_VALUE: Final = "auto"
_HALF_PRECISIONS: Final = ("fp16", "bf16")
_BUCKET_KEYS: Final = (
    # without the model's hidden size, DeepSpeed's defaults are better than a guess
    ("zero_optimization", "reduce_bucket_size"),
    ("zero_optimization", "allgather_bucket_size"),
    ("zero_optimization", "stage3_prefetch_bucket_size"),
    ("zero_optimization", "stage3_param_persistence_threshold"),
)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of the run at the start of an engine."""

    mixed_precision: str = "no"
    accumulation: int = 1
    world_size: int = 1
    micro_batch: int | None = None
    """Batch size of the loader prepared with the model; None if there is none."""
    hidden_size: int | None = None
    optimizer: Mapping[str, Any] | None = None
    """Options of a placeholder optimizer; None if the script has a real one."""
    scheduler: Mapping[str, Any] | None = None
    """Options of a placeholder scheduler; None if there is none."""
    on_cpu: bool = True


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Configuration for DeepSpeed, the settings that the loop handles itself, and notes on the choices made."""

    config: dict[str, Any]  # Any: DeepSpeed's keys and values
    stage: int
    clipping: float
    """Norm to clip gradients to if the loop does not clip; 0 turns clipping off."""
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _DraftConfig:
    """Configuration whose gaps are being filled."""

    config: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def find_section(self, name: str) -> dict[str, Any]:
        """Return the section, created when it is missing."""
        section: dict[str, Any] = self.config.setdefault(name, {})
        if not isinstance(section, dict):
            raise ConfigError(
                f"deepspeed.hf_ds_config has {name}={section!r}, but DeepSpeed expects a mapping there and would stop. "
                f"Write {name} as a mapping of its options."
            )
        return section

    def fill_value(self, section: str, key: str, value: Any, batch_reason: str) -> None:
        """Set a value that is missing or "auto"; note the value if it was "auto"."""
        options = self.find_section(section) if section else self.config
        if options.get(key, AUTO_VALUE) == AUTO_VALUE:
            if key in options:
                self.notes.append(
                    f"{section + '.' if section else ''}{key}: {value!r} ({batch_reason})"
                )
            options[key] = value


def read_config(config: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of DeepSpeed's configuration as a dict; a path is read as JSON.

    Raises: ConfigError for a file that is missing or does not hold a JSON object.
    """
    if isinstance(config, Mapping):
        # through JSON, which copies a mapping that two sections share into each of them
        return dict(json.loads(json.dumps({**config})))
    config_path = Path(config).expanduser()
    try:
        file_content = json.loads(config_path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"deepspeed.hf_ds_config={config!r} cannot be read ({type(error).__name__}: {error}), so the engine cannot be configured. "
            "Give the path of a JSON file in DeepSpeed's format, or a mapping."
        ) from error
    if not isinstance(file_content, dict):
        raise ConfigError(
            f"deepspeed.hf_ds_config={config!r} contains a {type(file_content).__name__}, not a JSON object. "
            "Write DeepSpeed's settings as {...}."
        )
    return file_content


def make_engine_config(plugin: DeepSpeedPlugin, run_facts: RunFacts) -> EngineConfig:
    """Return the configuration of one engine.

    Raises: ConfigError where DeepSpeed's file and the run contradict each other, or "auto" has no value.
    """
    draft_config = _DraftConfig(_config_of(plugin))
    stage = _fill_zero(draft_config, plugin)
    _fill_precision(draft_config, run_facts)
    _fill_batches(draft_config, plugin, run_facts)
    clipping = _take_clipping(draft_config, plugin)
    _fill_optimizer(draft_config, run_facts)
    _fill_scheduler(draft_config, run_facts)
    _fill_bucket_sizes(draft_config, run_facts)
    _refuse_autos(draft_config.config)
    return EngineConfig(draft_config.config, stage, clipping, tuple(draft_config.notes))


def stage_of(plugin: DeepSpeedPlugin) -> int:
    """Return the ZeRO stage of the settings. Raises: ConfigError for a stage that does not exist."""
    return _fill_zero(_DraftConfig(_config_of(plugin)), plugin)


# Any: DeepSpeed's keys and values
def make_building_config(
    plugin: DeepSpeedPlugin, mixed_precision: str
) -> dict[str, Any]:
    """Return the sections of the configuration with which ZeRO-3 partitions a model while it is built.

    Raises: ConfigError as `translate` does, and for other stages.
    """
    draft_config = _DraftConfig(_config_of(plugin))
    if (stage := _fill_zero(draft_config, plugin)) != 3:
        raise ConfigError(
            f"deepspeed.zero3_init_flag=True needs ZeRO stage 3, but the stage is {stage}, which does not partition parameters. Set "
            "zero_optimization.stage to 3, or remove zero3_init_flag."
        )
    run_facts = RunFacts(mixed_precision=mixed_precision)
    _fill_precision(draft_config, run_facts)
    _fill_bucket_sizes(draft_config, run_facts)
    section_names = ("zero_optimization", "aio", *_HALF_PRECISIONS)
    config = {}
    for section_name in section_names:
        if section_name in draft_config.config:
            config[section_name] = draft_config.config[section_name]
    zero_options = config["zero_optimization"]
    # torch's linear function stays until an engine computes
    zero_options["memory_efficient_linear"] = False
    _refuse_autos(config)
    return {**config, "train_micro_batch_size_per_gpu": 1}


def _config_of(plugin: DeepSpeedPlugin) -> dict[str, Any]:
    if plugin.hf_ds_config is not None:
        return read_config(plugin.hf_ds_config)
    zero_options: dict[str, Any] = {"stage": plugin.zero_stage}
    if plugin.offload_optimizer_device != "none":
        zero_options["offload_optimizer"] = {"device": plugin.offload_optimizer_device}
    if plugin.offload_param_device != "none":
        zero_options["offload_param"] = {"device": plugin.offload_param_device}
    if plugin.zero_stage == 3:
        zero_options["stage3_gather_16bit_weights_on_model_save"] = (
            plugin.zero3_save_16bit_model
        )
    return {"zero_optimization": zero_options}


def _refuse_autos(config: dict[str, Any]) -> None:
    if unfilled_keys := sorted(_find_autos(config)):
        raise ConfigError(
            f'deepspeed.hf_ds_config says "auto" for {", ".join(unfilled_keys)}, which hasten cannot fill, '
            "and DeepSpeed would read it as a string. Write the value."
        )


def _fill_zero(draft_config: _DraftConfig, plugin: DeepSpeedPlugin) -> int:
    zero_options = draft_config.find_section("zero_optimization")
    stage = zero_options.setdefault("stage", 0)
    if stage == AUTO_VALUE:
        draft_config.fill_value(
            "zero_optimization", "stage", plugin.zero_stage, "deepspeed.zero_stage"
        )
        stage = zero_options["stage"]
    if stage not in (0, 1, 2, 3):
        raise ConfigError(
            f"zero_optimization.stage={stage!r} is not a ZeRO stage. Set 0, 1, 2 or 3."
        )
    for offload_kind in ("optimizer", "param"):
        offload_device = _offload_device(zero_options, offload_kind)
        if offload_device == "nvme":
            raise ConfigError(
                f"zero_optimization.offload_{offload_kind}.device='nvme' is not supported: with files on a drive, DeepSpeed 0.19 loses gradients and "
                "updates without an error. Use device='cpu'."
            )
        if offload_device == "cpu" and (
            stage == 0 or (offload_kind == "param" and stage < 3)
        ):
            if offload_kind == "param":
                needed_stage = "stage 3"
            else:
                needed_stage = "stage 1, 2 or 3"
            raise ConfigError(
                f"zero_optimization.offload_{offload_kind}.device='cpu' needs {needed_stage}, but the stage is {stage}, so nothing would be "
                f"offloaded. Set zero_optimization.stage, or remove offload_{offload_kind}."
            )
    if stage == 1 and zero_options.get("overlap_comm"):
        zero_options["overlap_comm"] = False
        draft_config.notes.append(
            "zero_optimization.overlap_comm: False (at stage 1 gradients are reduced when the loop's window ends)"
        )
    # The script chooses its optimizer, and DeepSpeed's CPU optimizers need a compiler at run time.
    draft_config.fill_value(
        "", "zero_allow_untested_optimizer", True, "the script's optimizer is used"
    )
    draft_config.fill_value(
        "", "zero_force_ds_cpu_optimizer", False, "the script's optimizer is used"
    )
    return int(stage)


def _offload_device(zero: dict[str, Any], offload_kind: str) -> str:
    section = zero.get(f"offload_{offload_kind}") or {}
    if section.get("device") == AUTO_VALUE:
        section["device"] = "none"
    device = str(section.get("device", "none"))
    if device != "none":
        section.setdefault("pin_memory", False)
    return device


def _fill_precision(draft_config: _DraftConfig, run_facts: RunFacts) -> None:
    mixed_precision = run_facts.mixed_precision
    if mixed_precision == "fp8":
        raise ConfigError(
            "mixed_precision='fp8' is not supported under DeepSpeed, which has no fp8 training; use 'bf16'."
        )
    for precision_name in _HALF_PRECISIONS:
        if precision_name not in draft_config.config:
            if precision_name == mixed_precision:
                draft_config.config[precision_name] = {"enabled": True}
            continue
        draft_config.fill_value(
            precision_name,
            "enabled",
            precision_name == mixed_precision,
            f"mixed_precision={mixed_precision!r}",
        )
        enabled = draft_config.find_section(precision_name)["enabled"]
        if bool(enabled) != (precision_name == mixed_precision):
            matching_precision = precision_name if enabled else "no"
            raise ConfigError(
                f"DeepSpeed's configuration has {precision_name}.enabled={enabled}, but the run has mixed_precision={mixed_precision!r}; they "
                f"would compute in different precisions. Set mixed_precision={matching_precision!r}, or "
                f'{precision_name}.enabled to "auto".'
            )
    if mixed_precision == "fp16":
        scale_options = draft_config.find_section("fp16")
        for key, value in (
            ("loss_scale", 0),
            ("initial_scale_power", 16),
            ("loss_scale_window", 1000),
        ):
            if scale_options.get(key) == AUTO_VALUE:
                draft_config.fill_value("fp16", key, value, "dynamic scale")
    if draft_config.config.get("torch_autocast", {}).get("enabled"):
        raise ConfigError(
            "torch_autocast.enabled=True is not supported: hasten sets the precision from mixed_precision, and DeepSpeed's autocast "
            "would be applied in addition. Remove torch_autocast."
        )


def _fill_batches(
    draft_config: _DraftConfig, plugin: DeepSpeedPlugin, run_facts: RunFacts
) -> None:
    """Fill the batch sizes; DeepSpeed's accumulation is off, because the loop's clock accumulates."""
    config = draft_config.config
    world_size = run_facts.world_size
    requested_steps = [
        plugin.gradient_accumulation_steps,
        config.get("gradient_accumulation_steps", AUTO_VALUE),
    ]
    for requested_step_count in requested_steps:
        if requested_step_count not in (None, AUTO_VALUE, run_facts.accumulation):
            raise ConfigError(
                f"DeepSpeed's gradient_accumulation_steps={requested_step_count} and the loop's gradient_accumulation_steps="
                f"{run_facts.accumulation} differ; the updates would occur at different batches than with other strategies. Give "
                f'Accelerator(gradient_accumulation_steps={requested_step_count}), or write "auto".'
            )
    micro_batch = config.get("train_micro_batch_size_per_gpu", AUTO_VALUE)
    whole_batch = config.get("train_batch_size", AUTO_VALUE)
    if micro_batch == AUTO_VALUE and whole_batch != AUTO_VALUE:
        micro_batch, remainder = divmod(
            int(whole_batch), run_facts.accumulation * world_size
        )
        if remainder or not micro_batch:
            raise ConfigError(
                f"train_batch_size={whole_batch} is not divisible by {run_facts.accumulation} accumulated micro-steps on {world_size} "
                f"processes, so the micro-batch size is not an integer. Set a multiple of {run_facts.accumulation * world_size}."
            )
        draft_config.notes.append(
            f"train_micro_batch_size_per_gpu: {micro_batch} (train_batch_size={whole_batch})"
        )
    if micro_batch == AUTO_VALUE:
        micro_batch = run_facts.micro_batch or 1
        if run_facts.micro_batch:
            batch_reason = "the loader's batch size"
        else:
            batch_reason = (
                "no loader was prepared in the same call; no effect on training"
            )
        draft_config.notes.append(
            f"train_micro_batch_size_per_gpu: {micro_batch} ({batch_reason})"
        )
    if whole_batch not in (
        AUTO_VALUE,
        micro_batch * run_facts.accumulation * world_size,
    ):
        raise ConfigError(
            f"train_batch_size={whole_batch}, but {micro_batch} samples a micro-batch x {run_facts.accumulation} micro-steps x {world_size} processes "
            f'are {micro_batch * run_facts.accumulation * world_size}. Write "auto" for one of them.'
        )
    config |= {
        "train_micro_batch_size_per_gpu": int(micro_batch),
        "gradient_accumulation_steps": 1,
        "train_batch_size": int(micro_batch) * world_size,
    }
    if run_facts.accumulation > 1:
        draft_config.notes.append(
            f"gradient_accumulation_steps: 1 in the engine (hasten accumulates {run_facts.accumulation} micro-steps)"
        )


def _take_clipping(draft_config: _DraftConfig, plugin: DeepSpeedPlugin) -> float:
    """Return the norm to clip to, and turn the engine's clipping off, so that gradients are clipped only once."""
    value = draft_config.config.get("gradient_clipping", plugin.gradient_clipping)
    if value == AUTO_VALUE:
        draft_config.notes.append(
            "gradient_clipping: off (the loop calls clip_grad_norm_)"
        )
    draft_config.config["gradient_clipping"] = 0.0
    return 0.0 if value in (None, AUTO_VALUE) else float(value)


def _fill_optimizer(draft_config: _DraftConfig, run_facts: RunFacts) -> None:
    section = draft_config.config.get("optimizer")
    if section is None:
        if run_facts.optimizer is not None:
            raise ConfigError(
                "a DummyOptim was prepared, but DeepSpeed's configuration has no optimizer section, so there is no optimizer. "
                'Add {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, or prepare a real optimizer.'
            )
        return
    if run_facts.optimizer is None:
        raise ConfigError(
            f"DeepSpeed's configuration has an optimizer section ({section.get('type')}) and the script prepares an optimizer; one of "
            "them would be ignored. Remove the section, or prepare hasten.DummyOptim(model.parameters())."
        )
    option_values = section.setdefault("params", {})
    for key, value in list(option_values.items()):
        if value == AUTO_VALUE:
            if key not in run_facts.optimizer:
                raise ConfigError(
                    f'optimizer.params.{key} is "auto", but DummyOptim was not given {key}. Pass it to DummyOptim, or write the value.'
                )
            option_values[key] = run_facts.optimizer[key]
            draft_config.notes.append(
                f"optimizer.params.{key}: {option_values[key]!r} (DummyOptim)"
            )
    if run_facts.on_cpu and section.get("type") in ("Adam", "AdamW"):
        # DeepSpeed's fused Adam compiles at its first use
        option_values.setdefault("torch_adam", True)


def _fill_scheduler(draft_config: _DraftConfig, run_facts: RunFacts) -> None:
    section = draft_config.config.get("scheduler")
    if section is None:
        return
    option_values = section.setdefault("params", {})
    scheduler_options = {} if run_facts.scheduler is None else run_facts.scheduler
    optimizer_lr = (
        (draft_config.config.get("optimizer") or {}).get("params", {}).get("lr")
    )
    known_options = {
        "warmup_min_lr": 0,
        "warmup_max_lr": optimizer_lr,
        "lr": optimizer_lr,
        "cycle_max_lr": optimizer_lr,
        **scheduler_options,
    }
    for key, value in list(option_values.items()):
        if value == AUTO_VALUE:
            if known_options.get(key) is None:
                raise ConfigError(
                    f'scheduler.params.{key} is "auto", but there is no value to fill in. Prepare hasten.DummyScheduler(optimizer, '
                    f"{key}=...), or write the value."
                )
            option_values[key] = known_options[key]
            draft_config.notes.append(
                f"scheduler.params.{key}: {option_values[key]!r} (DummyScheduler, or the optimizer's lr)"
            )


def _fill_bucket_sizes(draft_config: _DraftConfig, run_facts: RunFacts) -> None:
    hidden_size = run_facts.hidden_size
    for section, key in _BUCKET_KEYS:
        zero_options = draft_config.config.get(section, {})
        if zero_options.get(key) != AUTO_VALUE:
            continue
        if hidden_size is None or key == "allgather_bucket_size":
            del zero_options[key]
            draft_config.notes.append(
                f"{section}.{key}: DeepSpeed's default (the model has no config.hidden_size)"
            )
        else:
            value = {
                "reduce_bucket_size": hidden_size * hidden_size,
                "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
            }
            draft_config.fill_value(
                section,
                key,
                value.get(key, 10 * hidden_size),
                f"hidden_size={hidden_size}",
            )


def _find_autos(
    nested_value: Any, key_path: Sequence[str] = ()
) -> list[str]:  # Any: nested settings
    if isinstance(nested_value, Mapping):
        auto_paths = []
        for key, item in nested_value.items():
            auto_paths += _find_autos(item, (*key_path, str(key)))
        return auto_paths
    return [".".join(key_path)] if nested_value == AUTO_VALUE else []
