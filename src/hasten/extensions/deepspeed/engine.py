"""Start of a DeepSpeed engine: the package, its process group, and models that are built partitioned."""

from __future__ import annotations

import atexit
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from hasten import trees
from hasten.errors import PrepareError
from hasten.extensions.deepspeed.config import EngineConfig
from hasten.extensions.deepspeed.settings import DeepSpeedPlugin
from hasten.optim.engine import Placeholder
from hasten.optional import available, need
from hasten.runtime import env
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh import destroy_groups

VERSIONS: Final = ">=0.19,<0.20"
"""Versions that this adapter supports: gradients and shards have no public interface."""

_SHARED_MEMORY: Final = "deepspeed_shm_comm"
_ASK_LOCAL_RANK: Final = (
    "deepspeed.runtime.zero.utils",
    "deepspeed.runtime.zero.partition_parameters",
)


def import_deepspeed() -> Any:  # Any: DeepSpeed is untyped
    """Return the deepspeed module. Raises: MissingPackageError when it is absent or of another version."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from DeepSpeed's imports
        deepspeed_module = need("deepspeed", VERSIONS, "strategy='deepspeed'")
        # it compiles at import, which takes seconds and is only for the Muon optimizer
        with env.restored_environment():
            env.put_default("TORCHDYNAMO_DISABLE", "1")
            need("deepspeed.runtime.zero.muon.muon_optimizer")
    # it warns about optimizers that it has not tested
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed_module


class LinearSwitch:
    """Switch between torch's linear function and DeepSpeed's, which is in place only while an engine computes.

    ZeRO-3 replaces ``torch.nn.functional.linear`` for the rest of the process, so that models without an engine would use the
    replacement too, and could not be compiled.
    """

    def __init__(self, zero3_linear: Callable[..., Tensor]) -> None:
        self._own = zero3_linear
        self._before: list[Callable[..., Tensor]] = []

    def enter(self, *_: object) -> None:
        self._before.append(functional.linear)
        functional.linear = self._own

    def leave(self, *_: object) -> None:
        if self._before:  # a global hook may have raised before enter() was called
            functional.linear = self._before.pop()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()


def start_engine(
    model: nn.Module,
    optimizer: Optimizer,
    engine_config: EngineConfig,
    plugin: DeepSpeedPlugin,
    ctx: ProcessContext,
) -> tuple[Any, LinearSwitch | None]:  # Any: DeepSpeed is untyped
    """Return an engine for the model and its optimizer, and the engine's linear function. Ranks: every rank."""
    deepspeed = join_process_group(ctx)
    _mark_leaf_modules(deepspeed, model, plugin.transformer_moe_cls_names or ())
    engine_inputs: dict[str, Any] = {"optimizer": optimizer}
    if isinstance(optimizer, Placeholder):
        parameter_groups = []
        for group in optimizer.param_groups:
            parameter_groups.append({"params": group["params"]})
        if len(parameter_groups) > 1:
            model_parameters = parameter_groups
        else:
            model_parameters = parameter_groups[0]["params"]
        engine_inputs = {"model_parameters": model_parameters}
    with env.restored_environment(), warnings.catch_warnings():
        # deprecations of torch that DeepSpeed still uses
        warnings.simplefilter("ignore")
        for variable_name, variable_value in _launcher_variables(ctx).items():
            env.put_default(variable_name, variable_value)
        with torchs_linear() as zero3_linear:
            engine, *_ = deepspeed.initialize(
                model=model,
                config=engine_config.config,
                dist_init_required=False,
                **engine_inputs,
            )
    # stage 0 reduces at the window's end, so any backward works
    engine._support_torch_style_backward = True
    zero_options = engine_config.config["zero_optimization"]
    linear_switch = None
    if engine_config.stage == 3 and zero_options.get("memory_efficient_linear", True):
        linear_switch = LinearSwitch(zero3_linear)
    return engine, linear_switch


@contextmanager
def torchs_linear() -> Iterator[Callable[..., Tensor]]:
    """Context manager that yields DeepSpeed's linear function and restores torch's at its end."""
    deepspeed_linear: Callable[..., Tensor] = need(
        "deepspeed.runtime.zero.linear"
    ).zero3_linear_wrap
    torch_linear = functional.linear
    if torch_linear is deepspeed_linear:  # a library has built a partitioned model
        torch_linear = need(
            "deepspeed.runtime.zero.partition_parameters"
        ).Init.linear_bk
    try:
        yield deepspeed_linear
    finally:
        functional.linear = torch_linear


def _launcher_variables(ctx: ProcessContext) -> dict[str, str]:
    topology = ctx.topology
    return {
        "LOCAL_RANK": str(topology.local_rank),
        "RANK": str(topology.rank),
        "WORLD_SIZE": str(topology.world_size),
        # the group exists already; DeepSpeed only checks that these are set
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def join_process_group(ctx: ProcessContext) -> Any:  # Any: DeepSpeed is untyped
    """Return the deepspeed module, set up with this process's group instead of a destroyed one. Ranks: every rank."""
    deepspeed = import_deepspeed()
    if not dist.is_initialized():  # DeepSpeed needs a group even for one process
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(destroy_groups)
    # Its compilation takes a minute at first use, and only DeepSpeed's inference calls it.
    deepspeed.ops.__compatible_ops__[_SHARED_MEMORY] = False
    if ctx.device.type == "cpu" and deepspeed.get_accelerator().device_name() != "cpu":
        cpu_accelerator = need("deepspeed.accelerator.cpu_accelerator")
        deepspeed.accelerator.set_accelerator(cpu_accelerator.CPU_Accelerator())
    # ZeRO-3 reads its local rank from the environment while it runs, where a process without a launcher has none.
    for module_name in _ASK_LOCAL_RANK:
        need(module_name).os = SimpleNamespace(
            environ={"LOCAL_RANK": str(ctx.topology.local_rank)}
        )
    comm_module = deepspeed.comm.comm
    if getattr(comm_module.cdb, "hasten_world", None) is not dist.group.WORLD:
        comm_module.cdb = None
        deepspeed.utils.groups._release_process_group_references()
        _reset_counters()
        with env.restored_environment():
            for module_name, variable_value in _launcher_variables(ctx).items():
                env.put_default(module_name, variable_value)
            deepspeed.init_distributed(
                deepspeed.get_accelerator().communication_backend_name(), verbose=False
            )
        comm_module.cdb.hasten_world = dist.group.WORLD
        for engine_name, module_name in (
            ("all_gather_function", "all_gather_single"),
            ("reduce_scatter_function", "reduce_scatter_single"),
        ):
            # torch<2.13 has the old names only
            if (torch_function := getattr(dist, module_name, None)) is not None:
                setattr(comm_module.cdb, engine_name, torch_function)
    return deepspeed


def _reset_counters() -> None:
    """Number ZeRO-3's modules and parameters from 0: ranks of a new group may have had different engines before."""
    need("deepspeed.runtime.zero.partition_parameters").Init.param_id = 0
    offload = need("deepspeed.runtime.zero.parameter_offload").DeepSpeedZeRoOffload
    (counter,) = inspect.unwrap(offload._register_deepspeed_module).__defaults__
    counter[0] = 0


def _mark_leaf_modules(
    deepspeed: Any, model: nn.Module, class_names: tuple[str, ...]
) -> None:
    """Mark the classes whose parameters ZeRO-3 gathers together."""
    if not class_names:
        return
    module_classes = {type(module).__name__: type(module) for module in model.modules()}
    if unknown_names := [name for name in class_names if name not in module_classes]:
        raise PrepareError(
            f"deepspeed.transformer_moe_cls_names names {unknown_names}, but {type(model).__name__} has no module of these classes, so their "
            f"parameters would be gathered one by one. Name classes of the model, such as {sorted(module_classes)[:3]}."
        )
    deepspeed.utils.set_z3_leaf_modules(
        model, [module_classes[name] for name in class_names]
    )


# Any in this file: DeepSpeed and transformers are untyped.
_TRANSFORMERS: Final = "transformers.integrations.deepspeed"
_CONFIG: Final = "_hf_deepspeed_config_weak_ref"
_FUNCTIONS_WITHOUT_VALUES: Final = frozenset(
    {"__get__", "__set__", "__hash__", "__repr__", "register_hook", "requires_grad_"}
)
"""Functions of a parameter that do not read its values."""


def is_partitioned(model: nn.Module) -> bool:
    """Return whether any parameter of the model was partitioned while it was built."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


@contextmanager
def partition_while_building(
    config: dict[str, Any], ctx: ProcessContext
) -> Iterator[None]:
    """Context manager in which constructors and transformers build partitioned models. Ranks: every rank."""
    deepspeed = join_process_group(ctx)
    with warnings.catch_warnings():
        # deprecations of torch that DeepSpeed still uses
        warnings.simplefilter("ignore")
        zero_init = deepspeed.zero.Init(
            config_dict_or_path=config, tensor_overrides=set()
        )
    partition_parameter: Callable[[Any], None] = zero_init._zero_init_param
    built_parameters: list[Any] = []

    def partition_and_note(parameter: Any) -> None:
        partition_parameter(parameter)
        built_parameters.append(parameter)

    zero_init._zero_init_param = partition_and_note
    # Importing transformers takes seconds; a script that builds one of its models has imported transformers already.
    registered_config = None
    if "transformers" in sys.modules:
        registered_config = RegisteredConfig(config)
    try:
        with (
            torchs_linear(),
            zero_init,
            _GatherAround(deepspeed.zero.GatheredParameters),
        ):
            yield
    finally:
        if registered_config is not None:
            registered_config.restore_config()
    for parameter in built_parameters:
        _convert_dtype(parameter, zero_init.dtype)


def _convert_dtype(parameter: Any, dtype: torch.dtype) -> None:
    """Convert a partitioned parameter to the engine's precision; constructors initialise in the parameter's dtype."""
    if parameter.is_floating_point() and parameter.dtype != dtype:
        parameter.all_gather()
        parameter.data = parameter.data.to(dtype)
        parameter.ds_tensor = None
        parameter.partition()


class RegisteredConfig:
    """DeepSpeed configuration registered with transformers: its models are built partitioned, or whole (None).

    The registration lasts as long as this object, or until `forget`.
    """

    def __init__(self, config: dict[str, Any] | None) -> None:
        self.config = config
        self._module = need(_TRANSFORMERS) if available(_TRANSFORMERS) else None
        if self._module is None:
            return
        self._previous_config = getattr(self._module, _CONFIG)
        if config is None:
            self._module.unset_hf_deepspeed_config()
        # else the arguments of a Trainer have registered one
        elif not self._module.is_deepspeed_zero3_enabled():
            self._module.set_hf_deepspeed_config(self)

    def is_zero3(self) -> bool:
        """Return True; transformers calls this method."""
        return True

    def restore_config(self) -> None:
        """Restore the configuration that transformers had before."""
        if self._module is not None:
            setattr(self._module, _CONFIG, self._previous_config)


class _GatherAround(TorchFunctionMode):
    """Torch function mode that gathers partitioned parameters around operations on them.

    A parameter holds no values once its module is built, so a constructor that initialises the weights of its children would
    have no effect.
    """

    def __init__(self, gather: Callable[..., Any]) -> None:
        super().__init__()
        self._gather = gather

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        keywords = kwargs or {}
        partitioned: list[Tensor] = []
        trees.map_tensors(
            lambda tensor: (
                partitioned.append(tensor) if _is_partitioned_away(tensor) else tensor
            ),
            (args, keywords),
        )
        function_name = getattr(func, "__name__", "")
        if partitioned and func == Tensor.data.__get__:  # type: ignore[attr-defined]
            raise PrepareError(
                "a constructor accesses the .data of a parameter that is already partitioned and empty here, so values written to it "
                "would be lost. Modify the parameter under torch.no_grad() instead of its .data, as the functions of torch.nn.init do, "
                "or build the model outside init_module()."
            )
        if not partitioned or function_name in _FUNCTIONS_WITHOUT_VALUES:
            return func(*args, **keywords)
        with self._gather(partitioned, modifier_rank=0):
            return func(*args, **keywords)


def _is_partitioned_away(tensor: Any) -> bool:
    return getattr(getattr(tensor, "ds_status", None), "name", "") == "NOT_AVAILABLE"


def make_whole(model: nn.Module, gather: Callable[..., Any]) -> None:
    """Replace the model's partitioned parameters by whole ones, for a model without an engine. Ranks: every rank."""
    whole_parameters: dict[int, nn.Parameter] = {}  # tied weights stay tied
    for module in model.modules():
        for parameter_name, parameter in list(module.named_parameters(recurse=False)):
            if not hasattr(parameter, "ds_id"):
                continue
            if id(parameter) not in whole_parameters:
                with gather([parameter]):
                    weight_values = parameter.detach().clone()
                whole_parameters[id(parameter)] = nn.Parameter(
                    weight_values, requires_grad=parameter.requires_grad
                )
            setattr(module, parameter_name, whole_parameters[id(parameter)])
