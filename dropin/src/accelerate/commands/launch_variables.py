"""The established variables that stand for a launch's settings: libraries in the workers look at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accelerate.utils.environment import environment
from hasten.cli.launch_cmd import make_parser
from hasten.config.effective import effective
from hasten.config.handoff import VARIABLE
from hasten.config.root import Config


def variables_for(words: Sequence[str]) -> Mapping[str, str]:
    """What workers of `launch WORDS` find in their environment besides what this process has."""
    given = make_parser().parse_args(words)
    env = {name: value for name, value in environment().items() if name != VARIABLE}
    return spelled(effective(env, given.config_file, given.settings).config)


def spelled(config: Config) -> dict[str, str]:
    """Settings as the established variables spell them; what is off is left out."""
    found: dict[str, str] = {"ACCELERATE_MIXED_PRECISION": config.mixed_precision}
    if config.cpu:
        found["ACCELERATE_USE_CPU"] = "true"
    if config.debug:
        found["ACCELERATE_DEBUG_MODE"] = "true"
    if config.gradient_accumulation.num_steps > 1:
        found["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(config.gradient_accumulation.num_steps)
    if config.strategy != "fsdp":
        return found
    fsdp = config.fsdp
    found |= {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": str(fsdp.reshard_after_forward).lower(),
        "FSDP_OFFLOAD_PARAMS": str(bool(fsdp.cpu_offload)).lower(),
        "FSDP_STATE_DICT_TYPE": fsdp.state_dict_type,
        "FSDP_CPU_RAM_EFFICIENT_LOADING": str(fsdp.cpu_ram_efficient_loading).lower(),
        "FSDP_SYNC_MODULE_STATES": str(fsdp.sync_module_states).lower(),
        "FSDP_ACTIVATION_CHECKPOINTING": str(fsdp.activation_checkpointing).lower(),
    }
    if isinstance(fsdp.auto_wrap_policy, str) and fsdp.auto_wrap_policy != "auto":
        found["FSDP_AUTO_WRAP_POLICY"] = fsdp.auto_wrap_policy.upper()
    if fsdp.transformer_cls_names_to_wrap:
        found["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(fsdp.transformer_cls_names_to_wrap)
    if fsdp.min_num_params:
        found["FSDP_MIN_NUM_PARAMS"] = str(fsdp.min_num_params)
    return found
