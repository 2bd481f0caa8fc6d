"""DeepSpeedPlugin: the established options of DeepSpeed, as hasten's settings."""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal

import hasten
from accelerate._impl import ambient
from accelerate._impl.ambient import AMBIENT
from accelerate._impl.environment.variables import environment, str_to_bool
from accelerate._impl.settings.deepspeed_config import HfDeepSpeedConfig
from accelerate._impl.settings.filled import fill_from_variables
from accelerate._impl.surface.lazy import Deferred
from accelerate._impl.surface.messages import message
from accelerate._impl.surface.shown import shown_property
from hasten.optional import available, need
from hasten.runtime.context import ProcessContext

# Any in this file: keys and values of DeepSpeed's configuration.
reading = Deferred("hasten.extensions.deepspeed.config")
engine = Deferred("hasten.extensions.deepspeed.engine")
AUTO = "auto"
_ZERO = "zero_optimization"
_MOE = "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"
_OPTIONS: dict[str, tuple[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text()
)
"""By attribute: its key in DeepSpeed's configuration, and the value where none is given."""


@dataclass
class DeepSpeedPlugin:
    """Options of DeepSpeed; a configuration of DeepSpeed's own (`hf_ds_config`) wins over single options."""

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: Literal["O1", "O2"] | None = None
    deepspeed_config: dict[str, Any] = field(init=False, repr=False)
    _selected: bool = field(init=False, repr=False, default=False)
    _told: Any = field(init=False, repr=False, default=None, compare=False)

    def __post_init__(self) -> None:
        variables: Any = environment()
        if self.enable_msamp:
            raise NotImplementedError(message("no_msamp"))
        self.enable_msamp = False
        self.msamp_opt_level = self.msamp_opt_level or variables.get(
            "ACCELERATE_FP8_OPT_LEVEL", "O1"
        )
        self._take_config(variables)
        self._settle_building(variables)

    def _settle_building(self, variables: Any) -> None:
        """Decide whether models are built partitioned, and prepare DeepSpeed for it."""
        if self.zero3_init_flag is None:
            init_flag = variables.get(
                "ACCELERATE_DEEPSPEED_ZERO3_INIT", str(self.hf_ds_config.is_zero3())
            )
            self.zero3_init_flag = bool(str_to_bool(init_flag))
        if self.zero3_init_flag and not self.hf_ds_config.is_zero3():
            warnings.warn(message("zero3_init_only_there"), stacklevel=4)
            self.zero3_init_flag = False
        self._join_context(AMBIENT.context)

    def _take_config(self, variables: Any) -> None:
        if self.hf_ds_config is None:
            config_file = variables.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
            if config_file not in ("", "none"):
                self.hf_ds_config = config_file
            else:
                self.hf_ds_config = None
        self._fill_options()
        if self.hf_ds_config is None:
            self.hf_ds_config = HfDeepSpeedConfig(self._single_options())
        else:
            self._take_options(
                variables.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
            )
        self.deepspeed_config = self.hf_ds_config.config
        self.deepspeed_config["steps_per_print"] = float("inf")

    def _take_options(self, requested_fields: list[str]) -> None:
        """Read options in the configuration; those it leaves to the run are as given."""
        if not isinstance(self.hf_ds_config, HfDeepSpeedConfig):
            self.hf_ds_config = HfDeepSpeedConfig(self.hf_ds_config)
        if _ZERO not in self.hf_ds_config.config:
            raise ValueError(
                "Please specify the ZeRO optimization config in the DeepSpeed config."
            )
        option_names = [*_OPTIONS, "mixed_precision"]
        if any(option_name in requested_fields for option_name in option_names):
            option_names[5], option_names[6] = (
                option_names[6],
                option_names[5],
            )  # as the original names them
            raise ValueError(message("deepspeed_fields_ignored", option_names))
        for option_name, (config_key, _) in _OPTIONS.items():
            self.fill_match(
                config_key, must_match=False, **{config_key: getattr(self, option_name)}
            )
            setattr(
                self,
                option_name,
                self.hf_ds_config.get_value(config_key, getattr(self, option_name)),
            )
        self.hf_ds_config.set_stage_and_offload()

    def _fill_options(self) -> None:
        """Fill options that were not given, from variables or with defaults."""
        for option_name, (_, default) in _OPTIONS.items():
            if option_name.startswith("gradient"):
                prefix = "ACCELERATE_"
            else:
                prefix = "ACCELERATE_DEEPSPEED_"
            if option_name == "gradient_clipping":
                read: Callable[[str], Any] = _read_clipping
            else:
                read = partial(_parse_variable, default=default)
            fill_from_variables(self, prefix, **{option_name: (read, default)})
        assert self.zero_stage is not None, "settled above"
        self.zero_stage = int(self.zero_stage)

    def _single_options(self) -> dict[str, Any]:
        engine_config: dict[str, Any] = {
            "train_batch_size": AUTO,
            "train_micro_batch_size_per_gpu": AUTO,
        }
        for option_name, (config_key, _) in _OPTIONS.items():
            *path, last = config_key.split(".")
            reduce(
                lambda node, path_segment: node.setdefault(path_segment, {}),
                path,
                engine_config,
            )[last] = getattr(self, option_name)
        for offload_section in (
            engine_config[_ZERO]["offload_optimizer"],
            engine_config[_ZERO]["offload_param"],
        ):
            if offload_section["device"] != "nvme":
                offload_section["nvme_path"] = None
        return engine_config

    # -- what a run takes from it ---------------------------------------------------------------------------------
    def to_hasten(self) -> hasten.DeepSpeedPlugin:
        class_names = self.transformer_moe_cls_names or environment().get(_MOE)
        return hasten.DeepSpeedPlugin(
            hf_ds_config=self._for_the_engine(),
            is_train_batch_min=self.is_train_batch_min,
            zero3_init_flag=bool(self.zero3_init_flag) and self.hf_ds_config.is_zero3(),
            transformer_moe_cls_names=None
            if class_names is None
            else tuple(class_name.strip() for class_name in class_names.split(",")),
        )

    def _for_the_engine(self) -> dict[str, Any]:
        """Return the configuration without what the loop does itself."""
        engine_config = deepcopy(self.deepspeed_config)
        engine_config.pop("steps_per_print", None)  # infinity: never
        # the loop's clock accumulates, or a library that says 1
        engine_config["gradient_accumulation_steps"] = AUTO
        if engine_config.get("train_micro_batch_size_per_gpu", AUTO) != AUTO:
            engine_config["train_batch_size"] = AUTO
        for section_name in ("offload_optimizer", "offload_param"):
            section = engine_config.get(_ZERO, {}).get(section_name)
            if section is not None and section.get("device", "none") == "none":
                del engine_config[_ZERO][section_name]
        return engine_config

    @property
    def accumulation(self) -> int | None:
        """Micro-steps per update, where the configuration says a number."""
        steps = self.deepspeed_config.get("gradient_accumulation_steps", AUTO)
        return None if steps == AUTO else int(steps)

    # -- as libraries ask -----------------------------------------------------------------------------------------
    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        return bool(self.get_value(ds_key_long) == AUTO)

    def fill_match(
        self,
        ds_key_long: str,
        mismatches: list[str] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Write `kwargs[ds_key_long]` where the configuration says "auto"; note a value that differs from it."""
        node, key = self.hf_ds_config.find_config_node(ds_key_long)
        if node is None or key not in node:
            return
        if node[key] == AUTO:
            if ds_key_long not in kwargs:
                raise ValueError(message("deepspeed_value_missing", ds_key_long))
            node[key] = kwargs[ds_key_long]
        elif (
            must_match
            and ds_key_long in kwargs
            and node[key] != kwargs[ds_key_long]
            and mismatches is not None
        ):
            mismatches.append(
                f"- ds {ds_key_long}={node[key]} vs arg {ds_key_long}={kwargs[ds_key_long]}"
            )

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: Any = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill every "auto" for which there is a keyword. Raises: ValueError for values that contradict one."""
        contradictions: list[str] = [] if mismatches is None else mismatches
        for key, value in (self.deepspeed_config if config is None else config).items():
            if isinstance(value, dict):
                self.deepspeed_config_process(
                    f"{prefix}{key}.", contradictions, value, must_match, **kwargs
                )
            else:
                self.fill_match(
                    prefix + key, contradictions, must_match=must_match, **kwargs
                )
        if contradictions and not prefix:
            raise ValueError(
                "\n".join(
                    [
                        message("deepspeed_mismatch"),
                        *contradictions,
                        message("deepspeed_mismatch_remedy"),
                    ]
                )
            )

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Let the configuration say the run's precision. Raises: ValueError where it says another."""
        config = self.deepspeed_config
        precision = "bf16" if mixed_precision == "fp8" else mixed_precision
        for precision_name, other_precision in (("fp16", "bf16"), ("bf16", "fp16")):
            if (
                precision == precision_name
                and self.get_value(f"{other_precision}.enabled") is True
            ):
                raise ValueError(
                    message(
                        "precision_contradicts_deepspeed",
                        mixed_precision,
                        other_precision,
                    )
                )
            wide = {
                "enabled": precision == precision_name,
                **(
                    {"auto_cast": True} if precision == precision_name == "fp16" else {}
                ),
            }
            if config.setdefault(precision_name, wide).get("enabled") == AUTO:
                config[precision_name]["enabled"] = precision == precision_name

    def set_deepspeed_weakref(self) -> None:
        """Let transformers build models partitioned while this plugin lives, where `zero3_init_flag` says so."""
        self._told = None
        if self.zero3_init_flag:
            self._join_context(ambient.start())
            self._told = engine.RegisteredConfig(self._partition_config())

    def is_zero3_init_enabled(self) -> bool:
        """Return whether models are partitioned while transformers builds them."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """A block in which transformers builds models partitioned, or whole."""
        previous_flag = self.zero3_init_flag
        self.zero3_init_flag = enable
        if enable:
            self._join_context(ambient.start())
        registered_config = engine.RegisteredConfig(
            self._partition_config() if enable else None
        )
        try:
            yield
        finally:
            registered_config.restore_config()
            self.zero3_init_flag = previous_flag

    def _partition_config(self) -> dict[str, Any]:
        halves = []
        for precision_name in ("bf16", "fp16"):
            if self.get_value(f"{precision_name}.enabled") is True:
                halves.append(precision_name)
        engine_options: dict[str, Any] = reading.building(
            self.to_hasten(), halves[0] if halves else "no"
        )
        return engine_options

    def _join_context(self, context: ProcessContext | None) -> None:
        """Let DeepSpeed use the processes of the run: transformers partitions a model before an engine starts."""
        if self.zero3_init_flag and context is not None and available("deepspeed"):
            engine.join_process_group(context)

    def set_moe_leaf_modules(self, model: Any) -> None:
        """Mark the classes of `transformer_moe_cls_names`, whose parameters are gathered together, as prepare() does itself."""
        self.transformer_moe_cls_names = class_names = (
            self.transformer_moe_cls_names or environment().get(_MOE)
        )
        kinds = {}
        for submodule in model.modules():
            kinds[type(submodule).__name__] = type(submodule)
        names = []
        for class_name in (class_names or "").split(","):
            if class_name.strip():
                names.append(class_name.strip())
        if missing := [class_name for class_name in names if class_name not in kinds]:
            raise Exception(message("moe_class_missing", missing[0]))
        if names:
            need("deepspeed.utils").set_z3_leaf_modules(
                model, [kinds[class_name] for class_name in names]
            )

    def _set_selected(self, value: bool) -> None:
        raise NotImplementedError(message("selected_by_state"))

    selected = shown_property(
        "_selected", "Whether this plugin is the one in use.", _set_selected
    )

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Make this plugin the one in use. Raises: ValueError when called by hand."""
        if not _from_accelerator_state:
            raise ValueError(message("select_by_state"))
        self._selected = True

    def _unselect_plugin(self) -> None:
        self._selected = False


Plugins = DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None


def active_plugin(plugins: Plugins) -> DeepSpeedPlugin | None:
    if isinstance(plugins, dict):
        return next(plugin for plugin in plugins.values() if plugin.selected)
    return plugins


def _read_clipping(variable_text: str) -> Any:
    if variable_text == AUTO:
        return variable_text
    return float(variable_text)


def _parse_variable(variable_text: str, default: Any) -> Any:
    if isinstance(default, bool):
        return variable_text.lower() == "true"
    if variable_text.isdigit():
        return int(variable_text)
    return variable_text
