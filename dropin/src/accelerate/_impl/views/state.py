"""The states: process-wide views on the one ambient context and on the latest Accelerator's window and loaders."""

import logging
import threading
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from accelerate._impl import ambient
from accelerate._impl.ambient import AMBIENT
from accelerate._impl.enums import DistributedType, PrecisionType
from accelerate._impl.environment.variables import (
    environment,
    parse_flag_from_env,
    set_numa_affinity,
)
from accelerate._impl.settings.deepspeed_plugin import active_plugin
from accelerate._impl.surface.messages import message
from accelerate._impl.surface.shown import shown_property
from hasten.accelerator.process import Process
from hasten.runtime.bootstrap import GroupSettings
from hasten.runtime.devices import choose_device, use_device

logger = logging.getLogger("accelerate.state")
_KNOWN = "_cpu _mixed_precision backend device debug distributed_type num_processes process_index local_process_index fork_launched"
# Any in this file: plugins, loaders, and the functions that decorators take.


class ThreadLocalSharedDict(threading.local):
    def __init__(self, thread_local: bool = False) -> None:
        self._storage: dict[Any, Any] = {}

    def __get__(self, obj: Any, objtype: Any = None) -> dict[Any, Any]:
        return self._storage

    def __set__(self, obj: Any, value: dict[Any, Any]) -> None:
        self._storage = value


def is_initialized() -> bool:
    return bool(AMBIENT.whole)


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Nothing."""


def distributed_type_of(
    strategy: str, device: torch.device, num_processes: int
) -> DistributedType:
    if strategy in ("fsdp", "deepspeed"):
        return DistributedType(strategy.upper())
    if device.type == "xla":
        return DistributedType.XLA
    if num_processes == 1:
        return DistributedType.NO
    return DistributedType(
        "MULTI_GPU" if device.type == "cuda" else f"MULTI_{device.type.upper()}"
    )


def _ask_process(name: str) -> Any:
    """Return what hasten's Process has under this name, of the process that runs now; its properties are PartialState's."""
    process_member = getattr(Process, name)
    if isinstance(process_member, property):
        return shown_property(
            lambda self: getattr(PartialState(), name), str(process_member.__doc__)
        )

    @wraps(process_member)
    def asked(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(ambient.process(), name)(*args, **kwargs)

    return asked


class _Shared:
    """The position of this process among the others, which both states show."""

    _shared_state: dict[str, Any]
    _known_attrs: tuple[str, ...]
    # shown to type checkers, here and below; the values live in the shared dictionary
    device: torch.device
    distributed_type: DistributedType
    num_processes: int
    process_index: int
    local_process_index: int

    initialized = shown_property(
        lambda self: bool(self._shared_state), "Whether this has been made."
    )
    is_main_process = _ask_process("is_main_process")
    is_local_main_process = _ask_process("is_local_main_process")
    is_last_process = _ask_process("is_last_process")
    wait_for_everyone = _ask_process("wait_for_everyone")
    print = _ask_process("print")
    on_main_process = _ask_process("on_main_process")
    on_local_main_process = _ask_process("on_local_main_process")
    on_process = _ask_process("on_process")
    on_local_process = _ask_process("on_local_process")
    on_last_process = _ask_process("on_last_process")
    split_between_processes = _ask_process("split_between_processes")
    main_process_first = _ask_process("main_process_first")
    local_main_process_first = _ask_process("local_main_process_first")

    def destroy_process_group(self, group: Any = None) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(group)

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        if name in self._known_attrs:
            raise AttributeError(message("state_was_reset", kind, name))
        raise AttributeError(f"'{kind}' object has no attribute '{name}'")


class PartialState(_Shared):
    """This process among the others, without anything about training."""

    _shared_state: dict[str, Any] = AMBIENT.partial
    _known_attrs = tuple(_KNOWN.split())

    _cpu: bool
    backend: str | None
    debug: bool
    fork_launched: bool

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if self.initialized:
            return
        fill_partial(cpu, _group_settings(kwargs))

    def __repr__(self) -> str:
        return f"Distributed environment: {self.distributed_type}{('  Backend: ' + self.backend) if self.backend else ''}\nNum processes: {self.num_processes}\nProcess index: {self.process_index}\nLocal process index: {self.local_process_index}\nDevice: {self.device}\n"

    def _prepare_backend(
        self, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> Any:
        """Return torch's backend and how processes work together; clients replace it."""
        return self.backend, self.distributed_type

    _reset_state = staticmethod(ambient.forget_process)

    use_distributed = shown_property(
        lambda self: self.distributed_type != "NO" and self.num_processes > 1,
        "Whether not alone.",
    )
    is_main_process = shown_property(
        lambda self: self.process_index == 0, "Whether this is the first process."
    )
    is_local_main_process = shown_property(
        lambda self: self.local_process_index == 0,
        "Whether it is the first of its node.",
    )
    is_last_process = shown_property(
        lambda self: self.process_index == self.num_processes - 1,
        "Whether this is the last one.",
    )
    default_device = shown_property(
        lambda self: torch.device(choose_device(0).type),
        "The device a process gets by default.",
    )

    def set_device(self) -> None:
        use_device(self.device)

    def on_main_process(self, function: Any = None) -> Any:
        if not self.initialized:
            raise ValueError(
                "The `PartialState` or `Accelerator` must be initialized before calling this function."
            )
        return super().on_main_process(function)


def _group_settings(kwargs: dict[str, Any]) -> GroupSettings:
    backend = kwargs.get("backend")
    timeout = kwargs.get("timeout")
    group_settings = GroupSettings(
        backend=None if backend == "nccl" else backend,
        init_method=kwargs.get("init_method"),
    )
    if timeout is None:
        return group_settings
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    return replace(group_settings, timeout_s=float(timeout))


def fill_partial(
    cpu: bool, settings: GroupSettings | None = None, strategy: str = "auto"
) -> None:
    """Write down what PartialState shows, starting the context on first use."""
    ctx = ambient.start(cpu, settings)
    topology = ctx.topology
    AMBIENT.partial.update(
        _cpu=cpu or parse_flag_from_env("ACCELERATE_USE_CPU"),
        backend=dist.get_backend()
        if dist.is_initialized() and topology.world_size > 1
        else None,
        device=_shown_device(ctx.device),
        debug=parse_flag_from_env("ACCELERATE_DEBUG_MODE"),
        distributed_type=distributed_type_of(strategy, ctx.device, topology.world_size),
        num_processes=topology.world_size,
        process_index=topology.rank,
        local_process_index=topology.local_rank,
        fork_launched=parse_flag_from_env("FORK_LAUNCHED"),
    )
    partial_state = PartialState()
    partial_state.backend, partial_state.distributed_type = (
        partial_state._prepare_backend(cpu)
    )
    if parse_flag_from_env("ACCELERATE_CPU_AFFINITY"):
        set_numa_affinity(topology.local_rank)


def _shown_device(run_device: torch.device) -> torch.device:
    """Return the device as it is shown: with the index of ACCELERATE_TORCH_DEVICE or of a launch, else without one."""
    if device_name := environment().get("ACCELERATE_TORCH_DEVICE"):
        if run_device.type == "cpu":
            return torch.device(device_name)
        return run_device
    if run_device.index or "LOCAL_RANK" in environment():
        return run_device
    return torch.device(run_device.type)


def fill_whole(mixed_precision: str, fsdp_plugin: Any = None, **plugins: Any) -> None:
    """Write down what AcceleratorState shows, beside what PartialState does."""
    if fsdp_plugin is not None:
        plugins["fsdp_plugin"] = fsdp_plugin
    compiled = (
        dynamo_plugin := plugins.get("dynamo_plugin")
    ) is not None and dynamo_plugin.backend != "NO"
    if (
        compiled
        and mixed_precision == "no"
        and AMBIENT.partial["device"].type == "cuda"
    ):
        # as scripts that compile have measured
        torch.backends.cuda.matmul.allow_tf32 = True
    nothing: dict[str, Any] = {"deepspeed_plugins": None, "device_mesh": None}
    AMBIENT.whole.update(
        AMBIENT.partial, **{**nothing, **plugins}, _mixed_precision=mixed_precision
    )


class AcceleratorState(_Shared):
    """PartialState, and what an Accelerator has settled for the whole process."""

    _shared_state: dict[str, Any] = AMBIENT.whole
    _known_attrs = (
        *_KNOWN.split(),
        "deepspeed_plugin",
        "megatron_lm_plugin",
        "dynamo_plugin",
        "fsdp_plugin",
    )

    _mixed_precision: str

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        if self.initialized:
            self._check_initialized(mixed_precision, cpu)
            return
        if not _from_accelerator:
            raise ValueError(message("accelerator_not_made"))
        PartialState(cpu, **kwargs)
        precision = str(
            mixed_precision or environment().get("ACCELERATE_MIXED_PRECISION", "no")
        ).lower()
        plugins = {
            "torch_tp_plugin": torch_tp_plugin,
            "parallelism_config": parallelism_config,
        }
        fill_whole(
            str(PrecisionType(precision)),
            fsdp_plugin,
            dynamo_plugin=dynamo_plugin,
            **plugins,
        )

    def _check_initialized(
        self, mixed_precision: str | None = None, cpu: bool | None = None
    ) -> None:
        AMBIENT.whole.update(AMBIENT.partial)
        if cpu and self.device.type != "cpu":
            raise ValueError(message("state_fixed", "cpu=True"))
        if mixed_precision is not None and mixed_precision != self._mixed_precision:
            raise ValueError(
                message("state_fixed", f"mixed_precision='{mixed_precision}'")
            )

    def __repr__(self) -> str:
        return (
            repr(PartialState()) + f"\nMixed precision type: {self.mixed_precision}\n"
        )

    mixed_precision = shown_property("_mixed_precision", "Compute precision.")
    use_distributed = shown_property(
        lambda self: PartialState().use_distributed,
        "Whether there are other processes.",
    )
    is_fsdp2 = shown_property(
        lambda self: self.distributed_type == DistributedType.FSDP,
        "Whether models are sharded.",
    )
    deepspeed_plugin = shown_property(
        lambda self: active_plugin(self.deepspeed_plugins),
        "The DeepSpeed plugin in use, if any.",
    )

    def get_deepspeed_plugin(self, name: str) -> Any:
        return self._named_plugins(name)[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        for plugin_name, plugin in self._named_plugins(name).items():
            plugin._unselect_plugin() if plugin_name != name else plugin.select(
                _from_accelerator_state=True
            )

    def _named_plugins(self, name: str | None) -> dict[str, Any]:
        plugins = self._shared_state.get("deepspeed_plugins")
        if plugins is None:
            raise ValueError(message("deepspeed_not_enabled"))
        if name not in (
            plugins_by_name := plugins if isinstance(plugins, dict) else {}
        ):
            raise ValueError(
                message(
                    "no_such_plugin", name, sorted(plugins_by_name) or "none by name"
                )
            )
        return plugins_by_name

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        AMBIENT.whole.clear()
        if reset_partial_state:
            PartialState._reset_state()


class GradientState:
    """The progress of the latest Accelerator's accumulation window and loaders."""

    _shared_state: dict[str, Any] = AMBIENT.gradient
    # shown to type checkers; it lives in the shared dictionary
    plugin_kwargs: dict[str, Any]

    def __init__(self, gradient_accumulation_plugin: Any = None) -> None:
        self.__dict__ = self._shared_state
        self.__dict__.setdefault("plugin_kwargs", {})
        if gradient_accumulation_plugin is not None:
            self.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()

    initialized = shown_property(
        lambda self: bool(GradientState._shared_state), "Whether this has been made."
    )

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        ambient.run_clock().force_boundary(sync_gradients)

    sync_gradients = shown_property(
        lambda self: ambient.run_clock().boundary,
        "Whether the window ends now.",
        _set_sync_gradients,
    )
    num_steps = shown_property(
        lambda self: int(self.plugin_kwargs.get("num_steps", 1)),
        "Micro-steps per update.",
    )
    adjust_scheduler = shown_property(
        lambda self: self.plugin_kwargs.get("adjust_scheduler", False),
        "Count every micro-step.",
    )
    sync_with_dataloader = shown_property(
        lambda self: self.plugin_kwargs.get("sync_with_dataloader", True),
        "End with loaders.",
    )
    active_dataloader = shown_property(
        lambda self: [None, *AMBIENT.loaders][-1],
        "The innermost loader being read, or None.",
    )
    dataloader_references = shown_property(
        lambda self: [None, *AMBIENT.loaders],
        "The loaders being iterated, after a None.",
    )
    in_dataloader = shown_property(
        lambda self: self.active_dataloader is not None,
        "Whether a loader is being iterated.",
    )

    end_of_dataloader = shown_property(
        lambda self: getattr(self.active_dataloader, "end_of_dataloader", False),
        "At the end.",
    )
    remainder = shown_property(
        lambda self: getattr(self.active_dataloader, "remainder", -1),
        "Samples of the last batch.",
    )
    is_xla_gradients_synced = False

    _add_dataloader = staticmethod(AMBIENT.loaders.append)
    _remove_dataloader = staticmethod(ambient.forget_loader)

    @staticmethod
    def _reset_state() -> None:
        AMBIENT.clock = None
        AMBIENT.gradient.clear()
        AMBIENT.loaders.clear()

    def __repr__(self) -> str:
        return f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\nExtra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
