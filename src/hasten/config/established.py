"""Settings under the names of Hugging Face Accelerate: its YAML keys, switches and environment variables."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from hasten.config.checks import Problems, nearest_name
from hasten.config.decode import Mismatch, to_bool
from hasten.config.legacy import OLD_NAMES
from hasten.config.root import Config
from hasten.config.schema import SETTABLE
from hasten.config.source import Marked, Path, SettingEntry, SettingSource, shown
from hasten.errors import ConfigFileError, SettingValueError, UnknownSettingError

SWITCHES: Final = MappingProxyType(
    {
        "use_ddp": "ddp",
        "use_fsdp": "fsdp",
        "use_deepspeed": "deepspeed",
        "use_megatron_lm": "megatron",
    }
)
"""Boolean settings that choose a strategy."""

_TOP: Final = MappingProxyType[str, Path](
    {
        "mixed_precision": ("mixed_precision",),
        "use_cpu": ("cpu",),
        "debug": ("debug",),
        "gradient_accumulation_steps": ("gradient_accumulation", "num_steps"),
        "main_training_function": ("xla", "main_training_function"),
        "downcast_bf16": ("xla", "downcast_bf16"),
        "tpu_name": ("xla", "tpu_name"),
        "tpu_zone": ("xla", "tpu_zone"),
        "tpu_use_cluster": ("xla", "tpu_use_cluster"),
        "tpu_use_sudo": ("xla", "tpu_use_sudo"),
        "tpu_vm": ("xla", "tpu_vm"),
        "tpu_env": ("xla", "tpu_env"),
        "command_file": ("xla", "command_file"),
        "commands": ("xla", "commands"),
        "dynamo_backend": ("dynamo", "backend"),
    }
    | {
        name: ("launch", name)
        for name in [
            "num_processes",
            "machine_rank",
            "num_machines",
            "gpu_ids",
            "main_process_ip",
            "main_process_port",
            "rdzv_backend",
            "same_network",
            "enable_cpu_affinity",
        ]
    }
)
_NESTED: Final = MappingProxyType(
    {
        "fsdp_config": ("fsdp", "fsdp_"),
        "deepspeed_config": ("deepspeed", "deepspeed_"),
        "megatron_lm_config": ("megatron", "megatron_lm_"),
        "dynamo_config": ("dynamo", "dynamo_"),
        "parallelism_config": ("parallelism", "parallelism_config_"),
        "fp8_config": ("fp8", "fp8_"),
        "mpirun_config": ("launch", "mpirun_"),
    }
)
_RENAMED: Final = MappingProxyType[tuple[str, str], Path](
    {
        ("fp8_config", "amax_history_length"): ("fp8", "te", "amax_history_len"),
        ("fp8_config", "amax_compute_algorithm"): ("fp8", "te", "amax_compute_algo"),
        ("fp8_config", "format"): ("fp8", "te", "fp8_format"),
        ("deepspeed_config", "gradient_accumulation_steps"): (
            "gradient_accumulation",
            "num_steps",
        ),
        ("deepspeed_config", "deepspeed_config_file"): ("deepspeed", "hf_ds_config"),
    }
)
_SAGEMAKER: Final = frozenset(
    [
        "ec2_instance_type",
        "iam_role_name",
        "image_uri",
        "profile",
        "region",
        "base_job_name",
        "pytorch_version",
        "transformers_version",
        "py_version",
        "sagemaker_inputs_file",
        "sagemaker_metrics_file",
        "additional_args",
    ]
)
_GONE: Final = MappingProxyType(
    {
        "ipex_config": "Intel's extension is part of torch now",
        "use_mps_device": "Apple devices are found by themselves",
        "downcase_fp16": "it never had an effect",
    }
)
MSAMP: Final = "MS-AMP is no longer maintained"
MSAMP_NAMES: Final = (
    "opt_level",
    "optimization_level",
    "enable_msamp",
    "msamp_opt_level",
)
"""Names of MS-AMP settings, which no longer have an effect."""
_DISTRIBUTED: Final = MappingProxyType[str, tuple[tuple[Path, Any], ...]](
    {
        "NO": (),
        "MULTI_CPU": ((("cpu",), True), (("strategy",), "ddp")),
        "FSDP": ((("strategy",), "fsdp"),),
        "DEEPSPEED": ((("strategy",), "deepspeed"),),
        "MEGATRON_LM": ((("strategy",), "megatron"),),
        "XLA": ((("launch", "tpu"), True), (("strategy",), "xla")),
        "TPU": ((("launch", "tpu"), True), (("strategy",), "xla")),
        "TP": (),
    }
    | {
        f"MULTI_{device}": ((("launch", "multi_gpu"), True), (("strategy",), "ddp"))
        for device in ("GPU", "NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")
    }
)
MARKS: Final = frozenset(
    {
        "compute_environment",
        "distributed_type",
        "fp16",
        *SWITCHES,
        *_NESTED,
        *_SAGEMAKER,
        *_GONE,
        *_TOP,
    }
    - Config.__dataclass_fields__.keys()
)
"""Top-level keys that only an Accelerate file has."""


@dataclass(slots=True)
class EstablishedReading:
    """Entries of an Accelerate file, with notes about their translation."""

    file: str
    problems: Problems
    entries: list[SettingEntry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def take(
        self,
        setting_path: Path,
        value: Any,
        line: int,
        said: str,
        *,
        weak: bool = False,
    ) -> None:
        """Add one setting; empty values are ignored."""
        if (
            value is not None
            and value != []
            and not (
                setting_path[0] != "mixed_precision" and value in ("None", "none", "")
            )
        ):
            source = SettingSource("file", f"{self.file}:{line}")
            self.entries.append(
                SettingEntry(
                    setting_path, value, source, text=True, said=said, weak=weak
                )
            )


def from_accelerate(
    tree: Marked, file: str, problems: Problems
) -> tuple[list[SettingEntry], list[str]]:
    """Return the entries of an Accelerate file, with notes about their translation.

    Every unknown key becomes a problem with file and line.
    Raises: ConfigFileError for a SageMaker file.
    """
    reading = EstablishedReading(file, problems)
    _refuse_sagemaker(tree, file)
    machines = tree.value.get("num_machines", Marked(1, 1)).value
    for file_key, marked_value in tree.value.items():
        if (
            file_key == "machine_rank"
            and marked_value.value == 0
            and machines in (None, 1, "1")
        ):
            continue  # always written, even if the cluster will number the machines
        with reading.problems.catching():
            _read_key(reading, file_key, marked_value)
    first = f"{file} is a Hugging Face Accelerate file; its settings are read under our names (config show --why)"
    return reading.entries, [first, *reading.notes]


def _refuse_sagemaker(tree: Marked, file: str) -> None:
    keys = sorted(
        _SAGEMAKER & tree.value.keys(), key=lambda file_key: tree.value[file_key].line
    )
    environment_kind = tree.value.get("compute_environment")
    if (
        environment_kind is not None
        and str(environment_kind.value).upper() == "AMAZON_SAGEMAKER"
    ):
        keys.insert(0, "compute_environment")
    if keys:
        line = tree.value[keys[0]].line
        raise ConfigFileError(
            f"{file}:{line}: {keys[0]!r} asks for Amazon SageMaker, which hasten does not start; "
            "start the job with SageMaker's own tools and call `hasten launch` inside it."
        )


def _read_key(reading: EstablishedReading, file_key: str, marked_value: Marked) -> None:
    line_text = f"{reading.file}:{marked_value.line}"
    if file_key == "compute_environment":
        if str(marked_value.value).upper() != "LOCAL_MACHINE":
            raise SettingValueError(
                f"{line_text}: compute_environment: {shown(marked_value.value)} is unknown; use LOCAL_MACHINE."
            )
    elif file_key == "distributed_type":
        _distributed_type(reading, marked_value, line_text)
    elif file_key in SWITCHES:
        if _is_switched_on(marked_value.value, f"{line_text}: {file_key}"):
            reading.take(("strategy",), SWITCHES[file_key], marked_value.line, file_key)
    elif file_key == "fp16":  # before mixed_precision existed
        value = (
            "fp16"
            if _is_switched_on(marked_value.value, f"{line_text}: {file_key}")
            else "no"
        )
        reading.take(("mixed_precision",), value, marked_value.line, file_key)
        reading.notes.append(
            f"{line_text}: fp16: {str(value == 'fp16').lower()} is mixed_precision: {value}"
        )
    elif file_key == "use_parallelism_config":
        _is_switched_on(
            marked_value.value, f"{line_text}: {file_key}"
        )  # the sizes themselves decide
    elif file_key in _GONE:
        if marked_value.plain():
            reading.notes.append(
                f"{line_text}: {file_key} has no meaning any more: {_GONE[file_key]}"
            )
    elif file_key in _TOP:
        reading.take(_TOP[file_key], marked_value.plain(), marked_value.line, file_key)
    elif file_key in _NESTED:
        _read_nested(reading, file_key, marked_value)
    else:
        known_keys = MARKS | {"mixed_precision", "debug", "use_parallelism_config"}
        raise _unknown_key(line_text, file_key, known_keys, reading.problems)


def _distributed_type(
    reading: EstablishedReading, marked_value: Marked, line_text: str
) -> None:
    kind = str(marked_value.value).upper()
    if kind not in _DISTRIBUTED:
        similar_kind = nearest_name(
            kind.lower(), [setting_name.lower() for setting_name in _DISTRIBUTED]
        ).upper()
        if similar_kind:
            hint = f"did you mean {similar_kind}?"
        else:
            hint = f"known are {', '.join(_DISTRIBUTED)}."
        raise SettingValueError(
            f"{line_text}: distributed_type: {shown(marked_value.value)} is unknown; {hint}"
        )
    for setting_path, value in _DISTRIBUTED[kind]:
        reading.take(
            setting_path,
            value,
            marked_value.line,
            "distributed_type",
            weak=kind.startswith("MULTI_"),
        )
    if kind == "TPU":
        reading.notes.append(f"{line_text}: distributed_type: TPU is called XLA now")


def _read_nested(
    reading: EstablishedReading, file_key: str, marked_value: Marked
) -> None:
    if marked_value.value is None:
        return
    line_text = f"{reading.file}:{marked_value.line}"
    if not isinstance(marked_value.value, Mapping):
        raise SettingValueError(
            f"{line_text}: {file_key} holds {shown(marked_value.plain())}, but settings are expected below it."
        )
    nested_paths = nested_names(file_key)
    for setting_name, nested_value in marked_value.value.items():
        line_source = f"{reading.file}:{nested_value.line}"
        if setting_name in MSAMP_NAMES:
            reading.notes.append(
                f"{line_source}: {file_key}.{setting_name} has no meaning any more: {MSAMP}"
            )
        elif setting_name not in nested_paths:
            reading.problems.add(
                _unknown_key(
                    line_source,
                    f"{file_key}.{setting_name}",
                    [f"{file_key}.{nested_name}" for nested_name in nested_paths],
                    reading.problems,
                )
            )
        elif (
            nested_paths[setting_name] == ("fp8", "backend")
            and str(nested_value.value).upper() == "MSAMP"
        ):
            message = f"{line_source}: fp8 backend MSAMP is no longer maintained; use AO (torchao) or TE (Transformer Engine)."
            reading.problems.add(SettingValueError(message))
        else:
            value = nested_value.plain()
            setting_path = nested_paths[setting_name]
            if (
                setting_path == ("gradient_accumulation", "num_steps")
                and value == "auto"
            ):
                setting_path = ("deepspeed", "gradient_accumulation_steps")
            reading.take(
                setting_path, value, nested_value.line, f"{file_key}.{setting_name}"
            )


def nested_names(file_key: str) -> Mapping[str, Path]:
    """Return the names that a nested mapping of an Accelerate file may contain, with their settings."""
    section, prefix = _NESTED[file_key]
    nested_paths: dict[str, Path] = {}
    for info in SETTABLE:
        if info.path[0] == section and (
            section != "launch" or info.path[-1].startswith(prefix)
        ):
            for flag in (*info.flags, info.path[-1]):
                nested_paths.setdefault(flag, info.path)
                nested_paths.setdefault(flag.removeprefix(prefix), info.path)
    if section == "fsdp":
        for old in OLD_NAMES:
            nested_paths |= {old: ("fsdp", old), f"fsdp_{old}": ("fsdp", old)}
    extra = {
        setting_name: setting_path
        for (nested, setting_name), setting_path in _RENAMED.items()
        if nested == file_key
    }
    return nested_paths | extra | dict.fromkeys(MSAMP_NAMES, ())


def _unknown_key(
    line_text: str, setting_name: str, known_keys: Iterable[str], problems: Problems
) -> UnknownSettingError:
    if problems.worth_a_hint:
        similar_key = nearest_name(setting_name, known_keys)
    else:
        similar_key = ""
    if similar_key:
        hint = f"did you mean {similar_key!r}?"
    else:
        hint = "remove it, or see docs/config.md for the known keys."
    return UnknownSettingError(
        f"{line_text}: unknown key {setting_name!r}, which would have no effect; {hint}"
    )


def _is_switched_on(value: Any, source_text: str) -> bool:
    try:
        return value is not None and to_bool(value)
    except Mismatch as error:
        raise SettingValueError(
            f"{source_text}: got {shown(value)}, expected true or false."
        ) from error


def from_established_environment(env: Mapping[str, str]) -> list[SettingEntry]:
    """Return the entries of Accelerate's environment variables."""
    entries = []
    for setting_name, setting_path in established_variables():
        value = env.get(setting_name, "")
        if value.strip() and not (
            setting_name.startswith("ACCELERATE_GRADIENT_ACC")
            and value.strip().lower() == "auto"
        ):
            entries.append(
                SettingEntry(
                    setting_path,
                    value,
                    SettingSource("environment", setting_name),
                    text=True,
                )
            )
    for switch, strategy in SWITCHES.items():
        setting_name = f"ACCELERATE_{switch.upper()}"
        if env.get(setting_name, "").strip() and _is_switched_on(
            env[setting_name], f"environment {setting_name}={env[setting_name]}"
        ):
            entries.append(
                SettingEntry(
                    ("strategy",),
                    strategy,
                    SettingSource("environment", setting_name),
                    text=True,
                )
            )
    return entries


def established_variables() -> Iterator[tuple[str, Path]]:
    """Yield every variable of Accelerate with its setting."""
    yield from _VARIABLES.items()
    for info in SETTABLE:
        match info.path:
            case ("parallelism" | "megatron", *_):
                yield info.flag.upper(), info.path
            case ("dynamo" | "fp8", *_):
                for flag in info.flags:
                    yield f"ACCELERATE_{flag.upper()}", info.path
            case ("fsdp", setting_name):
                yield f"FSDP_{setting_name.upper()}", info.path
    for old in OLD_NAMES:
        yield f"FSDP_{old.upper()}", ("fsdp", old)


_VARIABLES: Final = MappingProxyType[str, Path](
    {
        "ACCELERATE_MIXED_PRECISION": ("mixed_precision",),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
            "gradient_accumulation",
            "num_steps",
        ),
        "ACCELERATE_GRADIENT_CLIPPING": ("deepspeed", "gradient_clipping"),
        "ACCELERATE_USE_CPU": ("cpu",),
        "ACCELERATE_DEBUG_MODE": ("debug",),
        "ACCELERATE_CPU_AFFINITY": ("launch", "enable_cpu_affinity"),
        "ACCELERATE_DOWNCAST_BF16": ("xla", "downcast_bf16"),
        "ACCELERATE_NUM_PROCESSES": ("launch", "num_processes"),
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": ("deepspeed", "hf_ds_config"),
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("deepspeed", "zero_stage"),
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": (
            "deepspeed",
            "offload_optimizer_device",
        ),
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": (
            "deepspeed",
            "offload_param_device",
        ),
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": (
            "deepspeed",
            "offload_optimizer_nvme_path",
        ),
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": (
            "deepspeed",
            "offload_param_nvme_path",
        ),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": ("deepspeed", "zero3_init_flag"),
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": (
            "deepspeed",
            "zero3_save_16bit_model",
        ),
        "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": (
            "deepspeed",
            "transformer_moe_cls_names",
        ),
        "FSDP_TRANSFORMER_CLS_TO_WRAP": ("fsdp", "transformer_cls_names_to_wrap"),
    }
)

VARIABLES: Final = frozenset(
    [
        *(name for name, _ in established_variables()),
        *(f"ACCELERATE_{switch.upper()}" for switch in SWITCHES),
    ]
)
"""Names of all environment variables of Accelerate that are read."""
