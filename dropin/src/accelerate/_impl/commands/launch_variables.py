"""The established variables that stand for a launch's settings: libraries in the workers look at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accelerate._impl.environment.variables import environment
from hasten.cli.launch_cmd import make_parser
from hasten.config.effective import effective
from hasten.config.handoff import VARIABLE
from hasten.config.root import Config


def variables_for(words: Sequence[str]) -> Mapping[str, str]:
    """What workers of `launch WORDS` find in their environment besides what this process has."""
    return spelled(settings_for(words))


def settings_for(words: Sequence[str]) -> Config:
    """The settings that `launch WORDS` runs under."""
    given = make_parser("accelerate").parse_args(words)
    env = {name: value for name, value in environment().items() if name != VARIABLE}
    return effective(env, given.config_file, given.settings).config


def spelled(config: Config) -> dict[str, str]:
    """Settings as the established variables spell them; what is at its default is left out."""
    fsdp = config.fsdp
    steps = config.gradient_accumulation.num_steps
    policy = fsdp.auto_wrap_policy if isinstance(fsdp.auto_wrap_policy, str) else "auto"
    found = {
        "ACCELERATE_MIXED_PRECISION": "" if config.mixed_precision == "no" else config.mixed_precision,
        "ACCELERATE_USE_CPU": "true" if config.cpu else "",
        "ACCELERATE_DEBUG_MODE": "true" if config.debug else "",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(steps) if steps > 1 else "",
    }
    if config.strategy == "fsdp":
        found |= {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_RESHARD_AFTER_FORWARD": "" if fsdp.reshard_after_forward is True else str(fsdp.reshard_after_forward),
            "FSDP_OFFLOAD_PARAMS": "true" if fsdp.cpu_offload else "",
            "FSDP_STATE_DICT_TYPE": "" if fsdp.state_dict_type == "SHARDED_STATE_DICT" else fsdp.state_dict_type,
            "FSDP_CPU_RAM_EFFICIENT_LOADING": "true" if fsdp.cpu_ram_efficient_loading else "",
            "FSDP_SYNC_MODULE_STATES": "" if fsdp.sync_module_states else "false",
            "FSDP_ACTIVATION_CHECKPOINTING": "true" if fsdp.activation_checkpointing else "",
            "FSDP_AUTO_WRAP_POLICY": "" if policy == "auto" else policy.upper(),
            "FSDP_TRANSFORMER_CLS_TO_WRAP": ",".join(fsdp.transformer_cls_names_to_wrap or ()),
            "FSDP_MIN_NUM_PARAMS": str(fsdp.min_num_params or ""),
        }
    if config.strategy == "deepspeed":
        engine = config.deepspeed
        file = engine.hf_ds_config if isinstance(engine.hf_ds_config, str) else ""
        found |= {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": file,
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(engine.zero_stage),
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": engine.offload_optimizer_device,
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": engine.offload_param_device,
            "ACCELERATE_GRADIENT_CLIPPING": "" if engine.gradient_clipping is None else str(engine.gradient_clipping),
        }
    return {name: value for name, value in found.items() if value}


def spelled_in_full(config: Config) -> dict[str, str]:
    """Settings as the established variables spell them, precision and compilation also where they are at their defaults."""
    compiling = config.dynamo
    return {
        "ACCELERATE_MIXED_PRECISION": config.mixed_precision,
        "ACCELERATE_DYNAMO_BACKEND": str(compiling.backend).upper(),
        "ACCELERATE_DYNAMO_MODE": str(compiling.mode),
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": str(compiling.fullgraph),
        "ACCELERATE_DYNAMO_USE_DYNAMIC": str(bool(compiling.dynamic)),
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": str(compiling.use_regional_compilation),
        **spelled(config),
    }
