"""The settings file in its established form."""

import json
from dataclasses import dataclass, field, fields, make_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from accelerate._impl.enums import (
    ComputeEnvironment,
    DistributedType,
    SageMakerDistributedType,
)
from accelerate._impl.environment.variables import environment
from accelerate._impl.surface.messages import message
from hasten.config.files import accelerate_paths, read_contents

# Any in this file: values of settings.
_SWITCHES = dict.fromkeys(("use_cpu", "debug", "enable_cpu_affinity"), False)
# as it has always been
default_yaml_config_file = default_json_config_file = str(
    accelerate_paths(environment())[0]
)
default_config_file = default_yaml_config_file
cache_dir = str(Path(default_config_file).parent)
hf_cache_home = str(Path(cache_dir).parent)


def load_config_from_file(config_file: str | None) -> "BaseConfig":
    path = Path(config_file if config_file is not None else default_config_file)
    if config_file is not None and not path.is_file():
        raise FileNotFoundError(message("no_config_file", config_file))
    if not path.is_file() and (older := path.with_suffix(".json")).is_file():
        path = older
    text = read_contents(path)
    if path.suffix == ".json":
        values = json.loads(text)
    else:
        values = yaml.safe_load(text)
    return config_from(values, str(path))


def config_from(values: dict[str, Any], source: str) -> "BaseConfig":
    """Return the settings of a mapping. Raises: ValueError for unknown keys."""
    cloud = values.get("compute_environment") == "AMAZON_SAGEMAKER"
    config_class: type[BaseConfig] = SageMakerConfig if cloud else ClusterConfig
    field_names = {config_field.name for config_field in fields(config_class)}
    values = BaseConfig.process_config(dict(values))
    if cloud:
        values.pop("num_processes", None)
    if unknown := sorted(set(values) - field_names):
        raise ValueError(message("unknown_keys", source, unknown))
    return config_class(**values)


@dataclass
class BaseConfig:
    compute_environment: Any
    distributed_type: Any
    mixed_precision: str | None
    use_cpu: bool
    debug: bool

    def __post_init__(self) -> None:
        self.compute_environment = ComputeEnvironment(self.compute_environment)
        cloud = self.compute_environment == ComputeEnvironment.AMAZON_SAGEMAKER
        type_enum: Any = SageMakerDistributedType if cloud else DistributedType
        if self.distributed_type is not False:  # a bare NO in YAML
            self.distributed_type = type_enum(
                "XLA" if self.distributed_type == "TPU" else self.distributed_type
            )
        for config_field in fields(self):
            if (
                config_field.name.endswith("_config")
                and getattr(self, config_field.name) is None
            ):
                setattr(self, config_field.name, {})

    def to_dict(self) -> dict[str, Any]:
        values = {}
        for config_field in fields(self):
            values[config_field.name] = getattr(self, config_field.name)
        plain = {}
        for setting_name, setting_value in values.items():
            if isinstance(setting_value, Enum):
                plain[setting_name] = setting_value.value
            else:
                plain[setting_name] = setting_value
        set_values = {}
        for setting_name, setting_value in plain.items():
            if setting_value is not None and setting_value != {}:
                set_values[setting_name] = setting_value
        return set_values

    @staticmethod
    def process_config(config_dict: dict[str, Any]) -> dict[str, Any]:
        """Complete the mapping with what every file has, and return it. Raises: ValueError without a kind of processes."""
        if config_dict.get("distributed_type") is None:
            raise ValueError(
                "A `distributed_type` must be specified in the config file."
            )
        if config_dict["distributed_type"] == "NO":
            config_dict.setdefault("num_processes", 1)
        # in files of older versions, as is fp16
        if backend := config_dict.pop("dynamo_backend", None):
            if backend == "NO":
                config_dict["dynamo_config"] = {}
            else:
                config_dict["dynamo_config"] = {"dynamo_backend": backend}
        if config_dict.pop("fp16", False):
            precision = "fp16"
        else:
            precision = None
        required_values = {
            "compute_environment": ComputeEnvironment.LOCAL_MACHINE,
            "mixed_precision": precision,
            **_SWITCHES,
        }
        config_dict.update(
            {
                setting_name: setting_value
                for setting_name, setting_value in required_values.items()
                if setting_name not in config_dict
            }
        )
        return config_dict

    @classmethod
    def from_json_file(cls, json_file: str | None = None) -> "BaseConfig":
        return load_config_from_file(json_file or default_json_config_file)

    @classmethod
    def from_yaml_file(cls, yaml_file: str | None = None) -> "BaseConfig":
        return load_config_from_file(yaml_file or default_yaml_config_file)

    def to_json_file(self, json_file: str) -> None:
        Path(json_file).write_text(
            json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"
        )

    def to_yaml_file(self, yaml_file: str) -> None:
        Path(yaml_file).write_text(yaml.safe_dump(self.to_dict()))


def _make_config_class(name: str, description: str) -> Any:
    """Return a class of settings with the fields of the table: names that need a value, and defaults."""
    table = json.loads(Path(__file__).with_suffix(".json").read_text())[name]
    rows: Any = []
    for field_name, default in table["has"].items():
        rows.append((field_name, Any, field(default=default)))
    rows = [*((field_name, Any) for field_name in table["needed"]), *rows]
    return make_dataclass(
        name,
        rows,
        bases=(BaseConfig,),
        namespace={"__module__": __name__, "__doc__": description},
    )


ClusterConfig = _make_config_class(
    "ClusterConfig", "Settings of machines of one's own."
)
SageMakerConfig = _make_config_class(
    "SageMakerConfig", "Settings of SageMaker, whose own tools start jobs there."
)
