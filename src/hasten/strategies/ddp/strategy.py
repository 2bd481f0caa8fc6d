"""Transform that replicates a model over processes with torch's DistributedDataParallel."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from hasten import trees
from hasten.comm.process_group import ProcessGroupComm
from hasten.config.base import given
from hasten.config.sections.parallel import DistributedDataParallelKwargs
from hasten.errors import ConfigError, PrepareError, StepError
from hasten.modules.quantized import (
    copy_inner_tensors,
    from_bytes,
    is_torchao,
    to_bytes,
)
from hasten.optim.gradients import drop_gradients
from hasten.precision.base import Precision
from hasten.runtime.context import ProcessContext
from hasten.runtime.logs import get_logger
from hasten.runtime.mesh_plan import LOSS
from hasten.strategies.base import PrepareRequest, Stage, is_trainable
from hasten.strategies.ddp.buckets import fix_bucket_order

log = get_logger(__name__)

# torch's default; larger buckets delay the first reduction
_LEAST_MB = 25
_MOST_MB = 100
_HASTEN_OPTIONS = ("comm_hook", "comm_wrapper", "comm_state_option")


class Replicated(DistributedDataParallel):
    """DistributedDataParallel that forwards attribute access to the user's model."""

    routed: frozenset[str] = frozenset()
    _syncs_buffers = True
    """True if the next training forward synchronises buffers, whatever evaluations come before it."""

    def __getattr__(self, name: str) -> Any:  # Any: the user's attribute
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        value = getattr(super().__getattr__("module"), name)
        if not inspect.ismethod(value):
            return value
        if name in self.routed:
            return self._route_method(value)
        return self._guard_method(name, value)

    # Any: the user's arguments and outputs
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        trains = torch.is_grad_enabled()
        if trains:
            self.require_forward_param_sync = self._syncs_buffers
        try:
            outputs = super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        except RuntimeError as error:
            if "finished reduction" not in str(error):
                raise
            raise StepError(self._unused_message(str(error))) from error
        if trains:
            self._syncs_buffers = self.require_forward_param_sync
        return outputs

    def _route_method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method, called through this wrapper's forward so that its gradients are synchronised."""

        @functools.wraps(method)
        def call_routed(*args: Any, **kwargs: Any) -> Any:
            user_module = self.module
            instance_forward = self.module.__dict__.get("forward")

            def stand_in(*args: Any, **kwargs: Any) -> Any:
                # inside the method, forward is the model's again
                _put_forward(user_module, instance_forward)
                return method(*args, **kwargs)

            user_module.__dict__["forward"] = stand_in
            try:
                return self(*args, **kwargs)
            finally:
                _put_forward(user_module, instance_forward)

        return call_routed

    def _guard_method(
        self, name: str, method: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return the method with a check that its result does not bypass the synchronisation of gradients."""

        @functools.wraps(method)
        def call_guarded(*args: Any, **kwargs: Any) -> Any:
            method_output = method(*args, **kwargs)
            if torch.is_grad_enabled() and any(
                tensor.grad_fn is not None for tensor in trees.tensors(method_output)
            ):
                raise StepError(
                    f"{type(self.module).__name__}.{name}() returned tensors with gradients, but it bypasses the model's forward, so "
                    "these gradients would not be synchronized between processes. Call "
                    f"accelerator.mark_forward_method(model, {name!r}) once before training, call the model, or use torch.no_grad() if "
                    "no gradient is needed."
                )
            return method_output

        return call_guarded

    def _unused_message(self, text: str) -> str:
        """Return the message for torch's error about unused parameters, with their names."""
        parameter_names = []
        for parameter_name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                parameter_names.append(parameter_name)
        unused_indices = re.search(
            r"did not receive grad for rank \d+:((?: \d+)+)", text
        )
        if unused_indices:
            unused_names = []
            for index in unused_indices[1].split():
                if int(index) < len(parameter_names):
                    unused_names.append(parameter_names[int(index)])
        else:
            unused_names = []
        listed_names = (
            ", ".join(unused_names[:8])
            + (f" and {len(unused_names) - 8} more" if len(unused_names) > 8 else "")
            or "some parameters"
        )
        return (
            f"in the last step these parameters of {type(self.module).__name__} did not contribute to the loss: {listed_names}. The processes "
            "would wait for their gradients forever. Use every output in the loss, freeze the "
            "parameters with requires_grad_(False), or pass "
            "DistributedDataParallelKwargs(find_unused_parameters=True)."
        )


# Any: the instance's forward, or None
def _put_forward(module: nn.Module, instance_forward: Any) -> None:
    if instance_forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = instance_forward


class Replicate:
    """Transform that wraps trainable models so that backward averages their gradients over the ranks of the loss."""

    stage = Stage.DISTRIBUTE

    def __init__(
        self, ddp_config: DistributedDataParallelKwargs, by_size: bool = False
    ) -> None:
        self._config = ddp_config
        self._by_size = by_size
        self._wrapped = WeakSet[Replicated]()

    def apply(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ctx: ProcessContext,
        precision: Precision,
    ) -> nn.Module:
        if (
            not request.train
            or not is_trainable(model)
            or isinstance(model, DistributedDataParallel)
        ):
            return model
        comm = ctx.groups(*LOSS)
        if not isinstance(comm, ProcessGroupComm):
            return model
        if any(
            isinstance(parameter, nn.parameter.UninitializedParameter)
            for parameter in model.parameters()
        ):
            raise PrepareError(
                f"{type(model).__name__} has lazy parameters whose shapes are not known yet, so they cannot be "
                "replicated; run one batch through the model before prepare()."
            )
        _broadcast_quantized(model, comm)
        indexed = ctx.device.type != "cpu" and request.place
        wrapped = Replicated(
            model,
            device_ids=[ctx.device.index] if indexed else None,
            process_group=comm.group,
            **self._ddp_arguments(model),
        )
        fix_bucket_order(wrapped)
        _add_hook(wrapped, self._config, comm.group)
        self._wrapped.add(wrapped)
        return wrapped

    def _ddp_arguments(
        self, model: nn.Module
    ) -> dict[str, Any]:  # Any: torch's keywords
        ddp_options = _ddp_options(self._config)
        if self._by_size and "bucket_cap_mb" not in given(self._config):
            ddp_options["bucket_cap_mb"] = _bucket_mb(model)
        return ddp_options

    def gradients_s(self) -> float:
        """Return the seconds the last measured backward waited for gradients of other ranks; torch measures about 1 in 100."""
        waits_s = []
        for model in self._wrapped:
            if not hasattr(model, "_get_ddp_logging_data"):
                return 0.0
            times: dict[str, int] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            wait_ns = times.get("backward_comm_time", 0) - times.get(
                "backward_compute_comm_overlap_time", 0
            )
            waits_s.append(max(wait_ns, 0) / 1e9)
        return sum(waits_s) / len(waits_s) if waits_s else 0.0

    def undo(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        if isinstance(model, DistributedDataParallel):
            return model.no_sync()
        return nullcontext()

    # Any: tensors and extra state
    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        return dict(self.undo(model).state_dict())

    def mark_forward_method(self, model: nn.Module, name: str) -> None:
        if not isinstance(model, Replicated):
            return
        model.routed = model.routed | {name}

    @contextmanager
    def join(self, models: list[nn.Module]) -> Iterator[None]:
        joinable: list[Joinable] = []
        for model in models:
            if isinstance(model, DistributedDataParallel):
                joinable.append(model)
        with Join(joinable) if joinable else nullcontext():
            yield

    def drop_gradients(self, model: nn.Module) -> None:
        drop_gradients(model)


@torch.no_grad()
def _broadcast_quantized(model: nn.Module, group_comm: ProcessGroupComm) -> None:
    """Broadcast quantized weights of torchao from rank 0 as bytes; DDP's own broadcast does not support their class."""
    quantized_names: list[str] = []
    for parameter_name, weight in model.named_parameters():
        if is_torchao(weight):
            packed_bytes, layout = to_bytes(weight)
            copy_inner_tensors(
                from_bytes(group_comm.broadcast(packed_bytes), layout), weight
            )
            quantized_names.append(parameter_name)
    if quantized_names:
        ignored_names = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
        vars(model)["_ddp_params_and_buffers_to_ignore"] = [
            *ignored_names,
            *quantized_names,
        ]


def _bucket_mb(model: nn.Module) -> int:
    """Return the bucket size in MiB: a tenth of all gradients, so that most of them are reduced during the backward."""
    total_mb = (
        sum(
            parameter.numel() * parameter.element_size()
            for parameter in model.parameters()
            if parameter.requires_grad
        )
        / 2**20
    )
    bucket_mb = int(min(max(total_mb / 10, _LEAST_MB), _MOST_MB))
    log.info(
        "performance: gradients of %s (%.0f MiB) are exchanged in buckets of %d MiB, about ten in total; performance={'buckets': False} "
        "turns it off",
        type(model).__name__,
        total_mb,
        bucket_mb,
    )
    return bucket_mb


# Any: torch's keywords
def _ddp_options(ddp_config: DistributedDataParallelKwargs) -> dict[str, Any]:
    """Return the user's settings as keywords of this torch. Raises: ConfigError for a keyword that torch does not know."""
    ddp_parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    given_options = {}
    for option_name in sorted(given(ddp_config)):
        if option_name not in _HASTEN_OPTIONS:
            given_options[option_name] = getattr(ddp_config, option_name)
    unknown_names = []
    for option_name in given_options:
        if option_name not in ddp_parameters:
            unknown_names.append(option_name)
    if unknown_names:
        raise ConfigError(
            f"DistributedDataParallelKwargs({unknown_names[0]}=...) is not supported by torch {torch.__version__}, so it would be ignored; "
            "remove it, or install a newer torch."
        )
    changed_options = {}
    for option_name, option in given_options.items():
        if option != ddp_parameters[option_name].default:
            changed_options[option_name] = option
    return changed_options


def _add_hook(
    model: Replicated,
    ddp_config: DistributedDataParallelKwargs,
    process_group: dist.ProcessGroup,
) -> None:
    """Register the communication hook of the settings, which compresses gradients."""
    if ddp_config.comm_hook == "no":
        return
    if ddp_config.comm_hook == "bf16" and "nccl" not in str(
        dist.get_backend_config(process_group)
    ):
        raise ConfigError(
            "comm_hook='bf16' averages in bfloat16, which only the NCCL backend supports; this run uses "
            f"{dist.get_backend(process_group)}. Use comm_hook='fp16' or 'power_sgd', or no hook."
        )
    model.register_comm_hook(*comm_hook(ddp_config, process_group))


def comm_hook(
    ddp_config: DistributedDataParallelKwargs, group: dist.ProcessGroup | None
) -> tuple[object, Callable[..., Any]]:
    """Return the state and the function of the communication hook that the settings name."""
    state: object = group
    hooks: dict[str, Callable[..., Any]] = {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "power_sgd": powerSGD_hook.powerSGD_hook,
        "batched_power_sgd": powerSGD_hook.batched_powerSGD_hook,
    }
    hook = hooks[ddp_config.comm_hook]
    if ddp_config.comm_hook in ("power_sgd", "batched_power_sgd"):
        state = powerSGD_hook.PowerSGDState(
            process_group=group, **dict(ddp_config.comm_state_option)
        )
    wrappers: dict[str, Callable[..., Any]] = {
        "fp16": default_hooks.fp16_compress_wrapper,
        "bf16": default_hooks.bf16_compress_wrapper,
    }
    if ddp_config.comm_wrapper != "no":
        hook = wrappers[ddp_config.comm_wrapper](hook)
    return state, hook
