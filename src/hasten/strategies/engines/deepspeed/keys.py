"""Check of the keys of DeepSpeed's configuration: an unknown key raises an error that suggests the closest known one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Final, get_args

from hasten.errors import ConfigError

# Any in this file: values of DeepSpeed's configuration, and its classes, which need not be installed.

_TOP: Final = """
    activation_checkpointing aio allgather_size amp autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type
    compile compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last datastates_ckpt
    disable_allgather disable_python_gc dump_state elasticity expert_parallel flops_profiler fp16 fp32_allreduce
    gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor hybrid_engine log_level
    managed_gradient_accumulation memory_breakdown monitor_config nebula optimizer pipeline prescale_gradients
    progressive_layer_drop scheduler seq_parallel_communication_data_type sparse_attention sparse_gradients steps_per_print
    tensor_parallel tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
    """
"""Top-level keys of DeepSpeed 0.19."""
_LOOSE: Final = (
    (
        "activation_checkpointing",
        "partition_activations contiguous_memory_optimization cpu_checkpointing number_checkpoints "
        "synchronize_checkpoint_boundary profile",
    ),
    (
        "flops_profiler",
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    ),
    ("optimizer", "type params legacy_fusion"),
    ("scheduler", "type params"),
)
"""Sections in which DeepSpeed ignores unknown keys, with their known keys."""
_STRICT: Final = (
    ("zero_optimization", "deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    ("fp16", "deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
    ("bf16", "deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    ("tensorboard", "deepspeed.monitor.config", "TensorBoardConfig"),
    ("wandb", "deepspeed.monitor.config", "WandbConfig"),
    ("csv_monitor", "deepspeed.monitor.config", "CSVConfig"),
    ("comms_logger", "deepspeed.comm.config", "CommsLoggerConfig"),
    ("compile", "deepspeed.compile.config", "CompileConfig"),
    ("hybrid_engine", "deepspeed.runtime.config", "HybridEngineConfig"),
)
"""Sections described by a class of the installed DeepSpeed."""


def check(config: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError for a key that DeepSpeed does not know, at the top level or in a section; `source` names the file.

    Keys of the imported DeepSpeed, if it is imported, are accepted besides the keys listed here.
    """
    _refuse(config, {*_TOP.split(), *_constants("deepspeed.runtime.constants")}, source, "")
    for section, keys in _LOOSE:
        known = {*keys.split(), *(_constants("deepspeed.") if isinstance(config.get(section), Mapping) else ())}
        _refuse(config.get(section), known, source, section, keys.split())
    for section, module, name in _STRICT:
        model = getattr(sys.modules.get(module), name, None)
        if model is not None:
            _check_model(config.get(section), model, source, section)


@contextmanager
def refused_values() -> Iterator[None]:
    """Context manager that turns DeepSpeed's error about a value in a section into a ConfigError that names the value."""
    try:
        yield
    except ValueError as error:
        found = getattr(error, "errors", None)
        if type(error).__name__ != "ValidationError" or not callable(found):
            raise
        first: Any = found()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"DeepSpeed's configuration has {where}={first.get('input')!r}, which its {getattr(error, 'title', 'section')} refuses "
            f"({first['msg']}), so the engine cannot be built. Correct the value in deepspeed.hf_ds_config."
        ) from error


def _check_model(section: Any, model: Any, source: str, path: str) -> None:
    """Check one section and its subsections against the fields of a DeepSpeed class."""
    if not isinstance(section, Mapping):
        return
    fields: dict[str, Any] = getattr(model, "model_fields", {})
    if not fields:
        return
    named = {field.alias or name: field for name, field in fields.items()}
    _refuse(section, {*named, *fields}, source, path, list(named))
    for key, value in section.items():
        field = named.get(key) or fields.get(key)
        for kind in (getattr(field, "annotation", None), *get_args(getattr(field, "annotation", None))):
            _check_model(value, kind, source, f"{path}.{key}")


def _refuse(section: Any, known: Iterable[str], source: str, path: str, suggested: Iterable[str] | None = None) -> None:
    if not isinstance(section, Mapping):
        return
    allowed = set(known)
    for key in section:
        if not isinstance(key, str) or key in allowed or key.startswith(("_", "//", "#")):  # the latter are comments
            continue
        names = sorted(_TOP.split() if suggested is None else suggested)
        near = get_close_matches(key.lower(), names, n=1, cutoff=0.5)
        where = f"section {path!r}" if path else "the top level"
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}."
        raise ConfigError(
            f"{source}: DeepSpeed has no {key!r} at {where}, so the setting would have no effect; {hint} A key that begins with "
            "'_' is a comment."
        )


def _constants(prefix: str) -> set[str]:
    """Return the words in the constants modules of the imported DeepSpeed, its only list of keys."""
    found: set[str] = set()
    for name, module in list(sys.modules.items()):
        if name.startswith(prefix) and name.endswith("constants"):
            words = (value for key, value in vars(module).items() if key.isupper() and isinstance(value, str))
            found |= {word for word in words if re.fullmatch(r"[a-z][a-z0-9_]*", word)}
    return found
