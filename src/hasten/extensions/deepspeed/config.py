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
_DROPPED: Final = (
    # without the model's hidden size, DeepSpeed's defaults are better than a guess
    ("zero_optimization", "reduce_bucket_size"),
    ("zero_optimization", "allgather_bucket_size"),
    ("zero_optimization", "stage3_prefetch_bucket_size"),
    ("zero_optimization", "stage3_param_persistence_threshold"),
)


@dataclass(frozen=True, slots=True)
class Facts:
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
class _Filling:
    """Configuration whose gaps are being filled."""

    config: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def section(self, name: str) -> dict[str, Any]:
        """Return the section, created when it is missing."""
        section: dict[str, Any] = self.config.setdefault(name, {})
        if not isinstance(section, dict):
            raise ConfigError(
                f"deepspeed.hf_ds_config has {name}={section!r}, but DeepSpeed expects a mapping there and would stop. "
                f"Write {name} as a mapping of its options."
            )
        return section

    def fill(self, section: str, key: str, value: Any, reason: str) -> None:
        """Set a value that is missing or "auto"; note the value if it was "auto"."""
        options = self.section(section) if section else self.config
        if options.get(key, AUTO_VALUE) == AUTO_VALUE:
            if key in options:
                self.notes.append(
                    f"{section + '.' if section else ''}{key}: {value!r} ({reason})"
                )
            options[key] = value


def read_config(config: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of DeepSpeed's configuration as a dict; a path is read as JSON.

    Raises: ConfigError for a file that is missing or does not hold a JSON object.
    """
    if isinstance(config, Mapping):
        # through JSON, which copies a mapping that two sections share into each of them
        return dict(json.loads(json.dumps({**config})))
    path = Path(config).expanduser()
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"deepspeed.hf_ds_config={config!r} cannot be read ({type(error).__name__}: {error}), so the engine cannot be configured. "
            "Give the path of a JSON file in DeepSpeed's format, or a mapping."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"deepspeed.hf_ds_config={config!r} contains a {type(content).__name__}, not a JSON object. "
            "Write DeepSpeed's settings as {...}."
        )
    return content


def translate(plugin: DeepSpeedPlugin, facts: Facts) -> EngineConfig:
    """Return the configuration of one engine.

    Raises: ConfigError where DeepSpeed's file and the run contradict each other, or "auto" has no value.
    """
    filling = _Filling(_config_of(plugin))
    stage = _fill_zero(filling, plugin)
    _fill_precision(filling, facts)
    _fill_batches(filling, plugin, facts)
    clipping = _clipping(filling, plugin)
    _optimizer(filling, facts)
    _scheduler(filling, facts)
    _hidden_size(filling, facts)
    _refuse_autos(filling.config)
    return EngineConfig(filling.config, stage, clipping, tuple(filling.notes))


def stage_of(plugin: DeepSpeedPlugin) -> int:
    """Return the ZeRO stage of the settings. Raises: ConfigError for a stage that does not exist."""
    return _fill_zero(_Filling(_config_of(plugin)), plugin)


# Any: DeepSpeed's keys and values
def building(plugin: DeepSpeedPlugin, mixed_precision: str) -> dict[str, Any]:
    """Return the sections of the configuration with which ZeRO-3 partitions a model while it is built.

    Raises: ConfigError as `translate` does, and for other stages.
    """
    filling = _Filling(_config_of(plugin))
    if (stage := _fill_zero(filling, plugin)) != 3:
        raise ConfigError(
            f"deepspeed.zero3_init_flag=True needs ZeRO stage 3, but the stage is {stage}, which does not partition parameters. Set "
            "zero_optimization.stage to 3, or remove zero3_init_flag."
        )
    facts = Facts(mixed_precision=mixed_precision)
    _fill_precision(filling, facts)
    _hidden_size(filling, facts)
    section_names = ("zero_optimization", "aio", *_HALF_PRECISIONS)
    config = {
        name: filling.config[name] for name in section_names if name in filling.config
    }
    zero = config["zero_optimization"]
    # torch's linear function stays until an engine computes
    zero["memory_efficient_linear"] = False
    _refuse_autos(config)
    return {**config, "train_micro_batch_size_per_gpu": 1}


def _config_of(plugin: DeepSpeedPlugin) -> dict[str, Any]:
    if plugin.hf_ds_config is not None:
        return read_config(plugin.hf_ds_config)
    zero: dict[str, Any] = {"stage": plugin.zero_stage}
    if plugin.offload_optimizer_device != "none":
        zero["offload_optimizer"] = {"device": plugin.offload_optimizer_device}
    if plugin.offload_param_device != "none":
        zero["offload_param"] = {"device": plugin.offload_param_device}
    if plugin.zero_stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = (
            plugin.zero3_save_16bit_model
        )
    return {"zero_optimization": zero}


def _refuse_autos(config: dict[str, Any]) -> None:
    if unfilled_keys := sorted(_autos(config)):
        raise ConfigError(
            f'deepspeed.hf_ds_config says "auto" for {", ".join(unfilled_keys)}, which hasten cannot fill, '
            "and DeepSpeed would read it as a string. Write the value."
        )


def _fill_zero(filling: _Filling, plugin: DeepSpeedPlugin) -> int:
    zero = filling.section("zero_optimization")
    stage = zero.setdefault("stage", 0)
    if stage == AUTO_VALUE:
        filling.fill(
            "zero_optimization", "stage", plugin.zero_stage, "deepspeed.zero_stage"
        )
        stage = zero["stage"]
    if stage not in (0, 1, 2, 3):
        raise ConfigError(
            f"zero_optimization.stage={stage!r} is not a ZeRO stage. Set 0, 1, 2 or 3."
        )
    for kind in ("optimizer", "param"):
        device = _offload_device(zero, kind)
        if device == "nvme":
            raise ConfigError(
                f"zero_optimization.offload_{kind}.device='nvme' is not supported: with files on a drive, DeepSpeed 0.19 loses gradients and "
                "updates without an error. Use device='cpu'."
            )
        if device == "cpu" and (stage == 0 or (kind == "param" and stage < 3)):
            needed_stage = "stage 3" if kind == "param" else "stage 1, 2 or 3"
            raise ConfigError(
                f"zero_optimization.offload_{kind}.device='cpu' needs {needed_stage}, but the stage is {stage}, so nothing would be "
                f"offloaded. Set zero_optimization.stage, or remove offload_{kind}."
            )
    if stage == 1 and zero.get("overlap_comm"):
        zero["overlap_comm"] = False
        filling.notes.append(
            "zero_optimization.overlap_comm: False (at stage 1 gradients are reduced when the loop's window ends)"
        )
    # The script chooses its optimizer, and DeepSpeed's CPU optimizers need a compiler at run time.
    filling.fill(
        "", "zero_allow_untested_optimizer", True, "the script's optimizer is used"
    )
    filling.fill(
        "", "zero_force_ds_cpu_optimizer", False, "the script's optimizer is used"
    )
    return int(stage)


def _offload_device(zero: dict[str, Any], part: str) -> str:
    section = zero.get(f"offload_{part}") or {}
    if section.get("device") == AUTO_VALUE:
        section["device"] = "none"
    device = str(section.get("device", "none"))
    if device != "none":
        section.setdefault("pin_memory", False)
    return device


def _fill_precision(filling: _Filling, facts: Facts) -> None:
    mixed_precision = facts.mixed_precision
    if mixed_precision == "fp8":
        raise ConfigError(
            "mixed_precision='fp8' is not supported under DeepSpeed, which has no fp8 training; use 'bf16'."
        )
    for name in _HALF_PRECISIONS:
        if name not in filling.config:
            if name == mixed_precision:
                filling.config[name] = {"enabled": True}
            continue
        filling.fill(
            name,
            "enabled",
            name == mixed_precision,
            f"mixed_precision={mixed_precision!r}",
        )
        enabled = filling.section(name)["enabled"]
        if bool(enabled) != (name == mixed_precision):
            raise ConfigError(
                f"DeepSpeed's configuration has {name}.enabled={enabled}, but the run has mixed_precision={mixed_precision!r}; they "
                f"would compute in different precisions. Set mixed_precision={name if enabled else 'no'!r}, or "
                f'{name}.enabled to "auto".'
            )
    if mixed_precision == "fp16":
        scale = filling.section("fp16")
        for key, value in (
            ("loss_scale", 0),
            ("initial_scale_power", 16),
            ("loss_scale_window", 1000),
        ):
            if scale.get(key) == AUTO_VALUE:
                filling.fill("fp16", key, value, "dynamic scale")
    if filling.config.get("torch_autocast", {}).get("enabled"):
        raise ConfigError(
            "torch_autocast.enabled=True is not supported: hasten sets the precision from mixed_precision, and DeepSpeed's autocast "
            "would be applied in addition. Remove torch_autocast."
        )


def _fill_batches(filling: _Filling, plugin: DeepSpeedPlugin, facts: Facts) -> None:
    """Fill the batch sizes; DeepSpeed's accumulation is off, because the loop's clock accumulates."""
    config, world = filling.config, facts.world_size
    requested_steps = [
        plugin.gradient_accumulation_steps,
        config.get("gradient_accumulation_steps", AUTO_VALUE),
    ]
    for steps in requested_steps:
        if steps not in (None, AUTO_VALUE, facts.accumulation):
            raise ConfigError(
                f"DeepSpeed's gradient_accumulation_steps={steps} and the loop's gradient_accumulation_steps="
                f"{facts.accumulation} differ; the updates would occur at different batches than with other strategies. Give "
                f'Accelerator(gradient_accumulation_steps={steps}), or write "auto".'
            )
    micro_batch, whole_batch = (
        config.get("train_micro_batch_size_per_gpu", AUTO_VALUE),
        config.get("train_batch_size", AUTO_VALUE),
    )
    if micro_batch == AUTO_VALUE and whole_batch != AUTO_VALUE:
        micro_batch, remainder = divmod(int(whole_batch), facts.accumulation * world)
        if remainder or not micro_batch:
            raise ConfigError(
                f"train_batch_size={whole_batch} is not divisible by {facts.accumulation} accumulated micro-steps on {world} "
                f"processes, so the micro-batch size is not an integer. Set a multiple of {facts.accumulation * world}."
            )
        filling.notes.append(
            f"train_micro_batch_size_per_gpu: {micro_batch} (train_batch_size={whole_batch})"
        )
    if micro_batch == AUTO_VALUE:
        micro_batch = facts.micro_batch or 1
        reason = (
            "the loader's batch size"
            if facts.micro_batch
            else "no loader was prepared in the same call; no effect on training"
        )
        filling.notes.append(
            f"train_micro_batch_size_per_gpu: {micro_batch} ({reason})"
        )
    if whole_batch not in (AUTO_VALUE, micro_batch * facts.accumulation * world):
        raise ConfigError(
            f"train_batch_size={whole_batch}, but {micro_batch} samples a micro-batch x {facts.accumulation} micro-steps x {world} processes "
            f'are {micro_batch * facts.accumulation * world}. Write "auto" for one of them.'
        )
    config |= {
        "train_micro_batch_size_per_gpu": int(micro_batch),
        "gradient_accumulation_steps": 1,
        "train_batch_size": int(micro_batch) * world,
    }
    if facts.accumulation > 1:
        filling.notes.append(
            f"gradient_accumulation_steps: 1 in the engine (hasten accumulates {facts.accumulation} micro-steps)"
        )


def _clipping(filling: _Filling, plugin: DeepSpeedPlugin) -> float:
    """Return the norm to clip to, and turn the engine's clipping off, so that gradients are clipped only once."""
    value = filling.config.get("gradient_clipping", plugin.gradient_clipping)
    if value == AUTO_VALUE:
        filling.notes.append("gradient_clipping: off (the loop calls clip_grad_norm_)")
    filling.config["gradient_clipping"] = 0.0
    return 0.0 if value in (None, AUTO_VALUE) else float(value)


def _optimizer(filling: _Filling, facts: Facts) -> None:
    section = filling.config.get("optimizer")
    if section is None:
        if facts.optimizer is not None:
            raise ConfigError(
                "a DummyOptim was prepared, but DeepSpeed's configuration has no optimizer section, so there is no optimizer. "
                'Add {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, or prepare a real optimizer.'
            )
        return
    if facts.optimizer is None:
        raise ConfigError(
            f"DeepSpeed's configuration has an optimizer section ({section.get('type')}) and the script prepares an optimizer; one of "
            "them would be ignored. Remove the section, or prepare hasten.DummyOptim(model.parameters())."
        )
    params = section.setdefault("params", {})
    for key, value in list(params.items()):
        if value == AUTO_VALUE:
            if key not in facts.optimizer:
                raise ConfigError(
                    f'optimizer.params.{key} is "auto", but DummyOptim was not given {key}. Pass it to DummyOptim, or write the value.'
                )
            params[key] = facts.optimizer[key]
            filling.notes.append(
                f"optimizer.params.{key}: {params[key]!r} (DummyOptim)"
            )
    if facts.on_cpu and section.get("type") in ("Adam", "AdamW"):
        # DeepSpeed's fused Adam compiles at its first use
        params.setdefault("torch_adam", True)


def _scheduler(filling: _Filling, facts: Facts) -> None:
    section = filling.config.get("scheduler")
    if section is None:
        return
    params = section.setdefault("params", {})
    given = {} if facts.scheduler is None else facts.scheduler
    rate = (filling.config.get("optimizer") or {}).get("params", {}).get("lr")
    known = {
        "warmup_min_lr": 0,
        "warmup_max_lr": rate,
        "lr": rate,
        "cycle_max_lr": rate,
        **given,
    }
    for key, value in list(params.items()):
        if value == AUTO_VALUE:
            if known.get(key) is None:
                raise ConfigError(
                    f'scheduler.params.{key} is "auto", but there is no value to fill in. Prepare hasten.DummyScheduler(optimizer, '
                    f"{key}=...), or write the value."
                )
            params[key] = known[key]
            filling.notes.append(
                f"scheduler.params.{key}: {params[key]!r} (DummyScheduler, or the optimizer's lr)"
            )


def _hidden_size(filling: _Filling, facts: Facts) -> None:
    size = facts.hidden_size
    for section, key in _DROPPED:
        place = filling.config.get(section, {})
        if place.get(key) != AUTO_VALUE:
            continue
        if size is None or key == "allgather_bucket_size":
            del place[key]
            filling.notes.append(
                f"{section}.{key}: DeepSpeed's default (the model has no config.hidden_size)"
            )
        else:
            value = {
                "reduce_bucket_size": size * size,
                "stage3_prefetch_bucket_size": int(0.9 * size * size),
            }
            filling.fill(section, key, value.get(key, 10 * size), f"hidden_size={size}")


def _autos(value: Any, path: Sequence[str] = ()) -> list[str]:  # Any: nested settings
    if isinstance(value, Mapping):
        return [
            found
            for key, item in value.items()
            for found in _autos(item, (*path, str(key)))
        ]
    return [".".join(path)] if value == AUTO_VALUE else []
