"""The established variables that stand for a launch's settings: libraries in the workers look at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from operator import attrgetter
from typing import Any, Final

from accelerate._impl.environment.variables import environment
from hasten.cli.launch_cmd import make_parser
from hasten.config.established import established_variables
from hasten.config.files import effective_settings
from hasten.config.handoff import VARIABLE
from hasten.config.root import Config
from hasten.config.schema import BY_PATH
from hasten.config.sections.parallel import DeepSpeedSequenceParallelConfig
from hasten.config.source import SettingEntry, SettingSource

# Any in this file: values of settings.
_SEQUENCES: Final = "PARALLELISM_CONFIG_SP_"
_CAPITAL: Final = (
    _SEQUENCES,
    "ACCELERATE_USE_CPU",
    "ACCELERATE_DYNAMO_",
    "ACCELERATE_FP8_",
)
_FSDP: Final = (
    "FSDP_ACTIVATION_",
    "FSDP_CPU_RAM_",
    "FSDP_RESHARD_",
    "FSDP_STATE_DICT_",
    "FSDP_SYNC_",
)
_ALWAYS: Final = (
    _SEQUENCES,
    "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "ACCELERATE_DEEPSPEED_OFFLOAD_",
    *_FSDP,
)
_OPTIONS: Final = ("parallelism", "sp_handler")
set_by_dropin: Final = partial(
    SettingEntry, source=SettingSource("code", "of the drop-in")
)


def variables_for(words: Sequence[str]) -> Mapping[str, str]:
    return spell_variables(settings_for(words))


def parse_sequence_options(words: Sequence[str]) -> list[SettingEntry]:
    """Settings that take the options of split sequences (`sp_*`) out of hasten's hands: workers find them in variables."""
    sequence_options = asdict(settings_for(words).parallelism.sp_handler)
    default_options = asdict(DeepSpeedSequenceParallelConfig())
    changed_options = []
    for option_name, option_value in default_options.items():
        if sequence_options[option_name] != option_value:
            changed_options.append(
                set_by_dropin((*_OPTIONS, option_name), option_value)
            )
    return changed_options


def settings_for(words: Sequence[str]) -> Config:
    parsed = make_parser("accelerate").parse_args(words)
    env = {
        variable_name: variable_text
        for variable_name, variable_text in environment().items()
        if variable_name != VARIABLE
    }
    return effective_settings(env, parsed.config_file, parsed.settings).config


def spell_variables(config: Config) -> dict[str, str]:
    """Settings of a launch as the established variables spell them; most that are at their defaults are left out."""
    variables = _changed_variables(
        config,
        "mixed_precision",
        "cpu",
        "debug",
        "gradient_accumulation",
        "dynamo",
        "fp8",
    )
    if config.strategy in ("fsdp", "deepspeed"):
        variables |= {
            f"ACCELERATE_USE_{config.strategy.upper()}": "true",
            **_changed_variables(config, config.strategy),
        }
    if config.strategy == "fsdp":
        variables |= {
            "FSDP_VERSION": "2",
            "FSDP_OFFLOAD_PARAMS": variables.get("FSDP_CPU_OFFLOAD", "false"),
        }
    if config.parallelism.sp_size > 1:
        variables |= {
            variable_name: variable_text
            for variable_name, variable_text in _changed_variables(
                config, "parallelism"
            ).items()
            if variable_name.startswith(_SEQUENCES)
        }
    return {
        variable_name: variable_text
        for variable_name, variable_text in variables.items()
        if variable_text
    }


def _changed_variables(config: Config, *sections: str) -> dict[str, str]:
    """Return the variables of some sections whose values are not the defaults, or that libraries read in any case."""
    paths = {}
    for variable_name, path in established_variables():
        if path[0] in sections and path in BY_PATH:
            paths[variable_name] = path
    values = {
        variable_name: attrgetter(".".join(path))(config)
        for variable_name, path in paths.items()
    }
    changed_values = {}
    for variable_name, setting_value in values.items():
        if setting_value != BY_PATH[paths[variable_name]].default:
            changed_values[variable_name] = setting_value
    always = {
        variable_name: setting_value
        for variable_name, setting_value in values.items()
        if variable_name.startswith(_ALWAYS)
    }
    spelled_variables = {}
    for variable_name, setting_value in {**changed_values, **always}.items():
        spelled_variables[variable_name] = _spell_value(variable_name, setting_value)
    return spelled_variables


def _spell_value(name: str, value: Any) -> str:
    # hasten hands DeepSpeed's own configuration on by itself
    if value is None or isinstance(value, Mapping):
        return ""
    if isinstance(value, bool):
        if name.startswith(_CAPITAL):
            return str(value)
        return str(value).lower()
    if isinstance(value, tuple):
        spelled_value = ",".join(map(str, value))
    else:
        spelled_value = str(value)
    if name in ("FSDP_AUTO_WRAP_POLICY", "ACCELERATE_DYNAMO_BACKEND"):
        return spelled_value.upper()
    return spelled_value
