"""Settings for `Accelerator(kwargs_handlers=[...])` and its plugins; each can say itself in hasten's terms."""

import copy
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile, schedule

import hasten
from accelerate._impl.enums import DDPCommunicationHookType, DynamoBackend
from accelerate._impl.environment.packages import (
    is_torchao_available,
    is_transformer_engine_available,
)
from accelerate._impl.settings.filled import Reading, fill_from_variables, is_yes
from accelerate._impl.surface import left_out
from accelerate._impl.surface.lazy import Deferred
from accelerate._impl.surface.messages import message
from hasten.optional import need

# Any in this file: the values of settings, and foreign configuration objects.
ddp = Deferred("hasten.strategies.ddp.strategy")
_READ: dict[type, Callable[[str], Any]] = {
    bool: is_yes,
    tuple: lambda word: tuple(is_yes(one.strip("( )")) for one in word.split(",")),
}
_TE: dict[str, Reading] = {
    one.name: (_READ.get(type(one.default), type(one.default)), one.default)
    for one in fields(hasten.TERecipeKwargs)
}


class KwargsHandler:
    """Base of settings that are handed to `Accelerator(kwargs_handlers=[...])`."""

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        plain = type(self)().to_dict()
        changed_values = {}
        for option_name, option_value in self.to_dict().items():
            if plain[option_name] != option_value:
                changed_values[option_name] = option_value
        return changed_values

    def to_hasten(self) -> Any:
        if (handler_class := getattr(hasten, type(self).__name__, None)) is None:
            left_out.refuse_use(
                f"utils.{type(self).__name__}", "no part of hasten has such settings"
            )
        return handler_class(
            **{
                option_name: option_value
                for option_name, option_value in self._set_values().items()
                if option_value is not None
            }
        )

    def _set_values(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass
class AutocastKwargs(KwargsHandler):
    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def to_dict(
        self,
        ignore_keys: Iterable[str] = ("comm_hook", "comm_wrapper", "comm_state_option"),
    ) -> dict[str, Any]:
        ddp_options = {}
        for option_name, option_value in super().to_dict().items():
            if option_name not in ignore_keys:
                ddp_options[option_name] = option_value
        return ddp_options

    def register_comm_hook(self, model: Any) -> None:
        """Register the hook on a module of torch's; prepare() does so itself."""
        if DDPCommunicationHookType(self.comm_hook) != DDPCommunicationHookType.NO:
            state, hook = ddp.comm_hook(self.to_hasten(), None)
            model.register_comm_hook(state=state, hook=hook)

    def _set_values(self) -> dict[str, Any]:
        # torch 2.13 warns of broadcast_buffers whenever it is given
        return self.to_kwargs() | {
            "comm_hook": DDPCommunicationHookType(self.comm_hook).value,
            "comm_wrapper": DDPCommunicationHookType(self.comm_wrapper).value,
            "comm_state_option": dict(self.comm_state_option),
        }


@dataclass
class GradScalerKwargs(KwargsHandler):
    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.timeout is None:
            self.timeout = timedelta(seconds=1800 if self.backend != "nccl" else 600)

    def _set_values(self) -> dict[str, Any]:
        # "nccl" is the default of a field, not a wish: hasten picks the backend by device.
        return {
            **self.__dict__,
            "backend": None if self.backend == "nccl" else self.backend,
        }


@dataclass
class ProfileKwargs(KwargsHandler):
    activities: list[Literal["cpu", "xpu", "mtia", "cuda", "hpu"]] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def _set_values(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "activities": None if self.activities is None else tuple(self.activities),
        }

    def _get_profiler_activity(self, activity: str) -> ProfilerActivity:
        available_backends = []
        for backend in ("xpu", "mtia", "hpu"):
            if hasattr(torch, backend) and getattr(torch, backend).is_available():
                available_backends.append(backend)
        known_activities = ["cpu", *available_backends, "cuda"]
        if activity not in known_activities:
            raise ValueError(
                f"Invalid profiler activity: {activity}. Must be one of {known_activities}."
            )
        profiler_activity: ProfilerActivity = getattr(
            ProfilerActivity, activity.upper()
        )
        return profiler_activity

    def build(self) -> profile:
        """torch's profiler with these options; `Accelerator.profile` also writes the traces."""
        profile_options = {}
        for option_name, option in vars(self).items():
            if option_name.startswith(("on", "record", "profile", "with")):
                profile_options[option_name] = option
        if self.activities is None:
            activities = None
        else:
            activities = []
            for option in self.activities:
                activities.append(self._get_profiler_activity(option))
        if self.schedule_option is None:
            profile_schedule = None
        else:
            profile_schedule = schedule(**self.schedule_option)
        return profile(
            activities=activities, schedule=profile_schedule, **profile_options
        )


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def _set_values(self) -> dict[str, Any]:
        return {**self.__dict__, "adjust_scheduler": None}  # scheduler.py reads it


@dataclass
class AORecipeKwargs(KwargsHandler):
    config: Any = None
    module_filter_func: Callable[..., bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        if not is_torchao_available():
            raise ImportError(
                "TorchAO is not available. Please install it or use a different backend."
            )
        if self.config is None:
            fill_from_variables(
                self,
                "ACCELERATE_FP8_",
                pad_inner_dim=(is_yes, True),
                enable_fsdp_float8_all_gather=(is_yes, True),
            )
            kind = need("torchao.float8").Float8LinearConfig
            gather = self.enable_fsdp_float8_all_gather
            self.config = kind(
                pad_inner_dim=self.pad_inner_dim, enable_fsdp_float8_all_gather=gather
            )


@dataclass
class TERecipeKwargs(KwargsHandler):
    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: Literal["HYBRID", "E4M3", "E5M2"] | None = None
    amax_history_len: int | None = None
    amax_compute_algo: Literal["max", "most_recent"] | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None

    def __post_init__(self) -> None:
        if not is_transformer_engine_available():
            raise ImportError(
                "TransformerEngine is not available. Please install it or use a different backend."
            )
        fill_from_variables(self, "ACCELERATE_", fp8_format=(str, "HYBRID"))
        fill_from_variables(self, "ACCELERATE_FP8_", **_TE)
        if self.fp8_format not in (known_formats := ("HYBRID", "E4M3", "E5M2")):
            raise ValueError(
                f"`fp8_format` must be one of {' or '.join(known_formats)}."
            )
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError("`amax_compute_algo` must be one of max or most_recent")


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """fp8 through MS-AMP, which is no longer maintained: accepted as a class, refused when used."""

    opt_level: Literal["O1", "O2"] | None = None

    def __post_init__(self) -> None:
        fill_from_variables(self, "ACCELERATE_FP8_", opt_level=(str, "O2"))
        if self.opt_level not in ("O1", "O2"):
            raise ValueError("`opt_level` must be one of O1 or O2")


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    backend: Literal["MSAMP", "TE"] | None = None

    def __post_init__(self) -> None:
        warnings.warn(message("fp8_recipe_deprecated"), FutureWarning, stacklevel=3)
        fill_from_variables(self, "ACCELERATE_FP8_", backend=(str, "TE"))
        backend_name: Any = str(self.backend).upper()
        if backend_name not in ("MSAMP", "TE"):
            raise ValueError(message("fp8_backend"))
        self.backend = backend_name
        super().__post_init__()

    def to_hasten(self) -> Any:
        option_names = [recipe_field.name for recipe_field in fields(TERecipeKwargs)]
        return TERecipeKwargs(
            **{option_name: getattr(self, option_name) for option_name in option_names}
        ).to_hasten()


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        prefix = "ACCELERATE_DYNAMO_"
        fill_from_variables(
            self,
            prefix,
            backend=(str, "no"),
            mode=(str, "default"),
            use_regional_compilation=(is_yes, False),
        )
        fill_from_variables(
            self, f"{prefix}USE_", fullgraph=(is_yes, False), dynamic=(is_yes, None)
        )
        self.backend = DynamoBackend(str(self.backend).upper())

    def to_dict(self) -> dict[str, Any]:
        values = copy.deepcopy(self.__dict__)
        values["backend"] = DynamoBackend(self.backend).value.lower()
        return values

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of torch.compile, including those set by variables."""
        plain = {"backend": "no", "mode": "default", "dynamic": None}
        values = self.to_dict()
        del values["use_regional_compilation"]
        changed_values = {}
        for option_name, option_value in values.items():
            if option_value not in (None, plain.get(option_name, False)):
                changed_values[option_name] = option_value
        return changed_values

    def _set_values(self) -> dict[str, Any]:
        """Return the arguments of torch.compile by `to_kwargs`, which clients replace, and the rest."""
        regional = self.use_regional_compilation
        return {
            "backend": self.to_dict()["backend"],
            "use_regional_compilation": regional,
            **self.to_kwargs(),
        }
