"""The settings file in its established form."""

import json
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from accelerate._impl.enums import ComputeEnvironment, DistributedType, SageMakerDistributedType
from accelerate._impl.environment import constants
from accelerate._impl.environment.variables import environment
from accelerate._impl.surface.messages import message
from hasten.config.files import accelerate_paths, contents

# Any in this file: values of settings.
default_yaml_config_file = str(accelerate_paths(environment())[0])
default_json_config_file = str(accelerate_paths(environment())[2])
default_config_file = default_yaml_config_file
cache_dir = str(Path(default_config_file).parent)
hf_cache_home = str(Path(cache_dir).parent)


def load_config_from_file(config_file: str | None) -> "BaseConfig":
    """The settings in a file, by default the established one."""
    path = Path(config_file if config_file is not None else default_config_file)
    if config_file is not None and not path.is_file():
        raise FileNotFoundError(message("no_config_file", config_file))
    if not path.is_file() and Path(default_json_config_file).is_file():
        path = Path(default_json_config_file)
    text = contents(path)
    values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    return config_from(values, str(path))


def config_from(values: dict[str, Any], place: str) -> "BaseConfig":
    """The settings of a mapping. Raises: ValueError for unknown keys."""
    kind = SageMakerConfig if values.get("compute_environment") == "AMAZON_SAGEMAKER" else ClusterConfig
    if values.get("distributed_type") is None:
        raise ValueError("A `distributed_type` must be specified in the config file.")
    known, values = {one.name for one in fields(kind)}, dict(values)
    if backend := values.pop("dynamo_backend", None):  # in files of older versions
        values["dynamo_config"] = {} if backend == "NO" else {"dynamo_backend": backend}
    precision = "fp16" if values.pop("fp16", False) else "no"  # there, too
    if unknown := sorted(set(values) - known):
        raise ValueError(message("unknown_keys", place, unknown))
    return kind(**BaseConfig.process_config({"mixed_precision": precision, "use_cpu": False, **values}))


@dataclass
class BaseConfig:
    """What every settings file has."""

    compute_environment: Any
    distributed_type: Any
    mixed_precision: str
    use_cpu: bool
    debug: bool

    def __post_init__(self) -> None:
        self.compute_environment = ComputeEnvironment(self.compute_environment)
        cloud = self.compute_environment == ComputeEnvironment.AMAZON_SAGEMAKER
        kind: Any = SageMakerDistributedType if cloud else DistributedType
        self.distributed_type = kind("XLA" if self.distributed_type == "TPU" else self.distributed_type)

    def to_dict(self) -> dict[str, Any]:
        """The settings that hold something, as plain values."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        plain = {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}
        return {name: value for name, value in plain.items() if value is not None and value != {}}

    @staticmethod
    def process_config(config_dict: dict[str, Any]) -> dict[str, Any]:
        """The mapping with what every file has."""
        return {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "debug": False, **config_dict}

    @classmethod
    def from_json_file(cls, json_file: str | None = None) -> "BaseConfig":
        """The settings in a JSON file."""
        return load_config_from_file(json_file or default_json_config_file)

    @classmethod
    def from_yaml_file(cls, yaml_file: str | None = None) -> "BaseConfig":
        """The settings in a YAML file."""
        return load_config_from_file(yaml_file or default_yaml_config_file)

    def to_json_file(self, json_file: str) -> None:
        """Write the settings as JSON."""
        Path(json_file).write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n")

    def to_yaml_file(self, yaml_file: str) -> None:
        """Write the settings as YAML."""
        Path(yaml_file).write_text(yaml.safe_dump(self.to_dict()))


@dataclass
class ClusterConfig(BaseConfig):
    """Settings of machines of one's own."""

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for one in fields(self):
            if one.name.endswith("_config") and getattr(self, one.name) is None:
                setattr(self, one.name, {})


@dataclass
class SageMakerConfig(BaseConfig):
    """Settings of SageMaker: read, but jobs there are started with SageMaker's own tools."""

    ec2_instance_type: str = ""
    iam_role_name: str = ""
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = "accelerate-sagemaker-1"
    pytorch_version: str = constants.SAGEMAKER_PYTORCH_VERSION
    transformers_version: str = constants.SAGEMAKER_TRANSFORMERS_VERSION
    py_version: str = constants.SAGEMAKER_PYTHON_VERSION
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] | None = None
    enable_cpu_affinity: bool = False
