"""Training on TPUs through torch_xla: one process per host drives all its devices, which share each batch (SPMD)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import count, zip_longest
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten.comm.base import Comm
from hasten.config.base import given
from hasten.config.root import Config
from hasten.errors import (
    ConfigError,
    DeviceError,
    MissingPackageError,
    PrepareError,
    StepError,
)
from hasten.extensions.xla import tpu_hosts
from hasten.extensions.xla.placing import Devices, PlaceOnDevices, Transfer
from hasten.extensions.xla.settings import XLAConfig
from hasten.modules.surgery import own_buffers
from hasten.optional import check_installed, need
from hasten.precision.base import Precision
from hasten.runtime import env
from hasten.runtime.context import ProcessContext
from hasten.runtime.logs import get_logger
from hasten.runtime.mesh_plan import LOSS, Axis
from hasten.runtime.topology import Topology
from hasten.strategies.base import (
    Caps,
    OfferedStrategy,
    PrepareRequest,
    Stage,
    is_trainable,
)
from hasten.strategies.native import Convert, NativeStrategy, SingleProcess

log = get_logger(__name__)

BUCKET_BYTES: Final = 64 * 2**20
"""Bytes of gradients in one message between hosts; host memory holds a few times as much."""

_LAZY_CLASSES: Final = (
    nn.parameter.UninitializedParameter,
    nn.parameter.UninitializedBuffer,
)


class FromFirstHost:
    """Transform that copies the parameters and buffers of the first host to all hosts, before they move to devices."""

    stage = Stage.PLACE

    def __init__(self, hosts: Comm) -> None:
        self._hosts = hosts

    @torch.no_grad()
    def apply(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ctx: ProcessContext,
        precision: Precision,
    ) -> nn.Module:
        if not request.train or not is_trainable(model):
            return model
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        if any(isinstance(tensor, _LAZY_CLASSES) for tensor in tensors.values()):
            raise PrepareError(
                f"{type(model).__name__} has lazy parameters whose shapes are not known yet, so they cannot be broadcast to all hosts; "
                "run one batch through the model before prepare()."
            )
        tensor_descriptions = []
        for name, tensor in tensors.items():
            tensor_descriptions.append(f"{name} {tuple(tensor.shape)} {tensor.dtype}")
        self._compare_models(
            model,
            tensor_descriptions,
        )
        for tensor in tensors.values():
            first_host_tensor = self._hosts.broadcast(tensor)
            if self._hosts.rank != 0:
                tensor.copy_(first_host_tensor)
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        return model

    def _compare_models(self, model: nn.Module, local_tensors: list[str]) -> None:
        """Raise on every host if one of them has built a different model."""
        tensors_of_hosts = self._hosts.all_gather_object(local_tensors)
        for host, host_tensors in enumerate(tensors_of_hosts):
            for host_tensor, first_tensor in zip_longest(
                host_tensors, tensors_of_hosts[0], fillvalue="nothing more"
            ):
                if host_tensor != first_tensor:
                    raise PrepareError(
                        f"in {type(model).__name__}, host {host} has {host_tensor} where host 0 has {first_tensor}; gradients of different models "
                        "cannot be averaged. Build the same model on every host."
                    )


class AcrossHosts(SingleProcess):
    """Averaging of gradients over hosts, at the end of each backward pass outside `no_sync`.

    Models are not wrapped. Persistent buffers are copied from the first host at the same time.
    """

    def __init__(self, hosts: Comm, placing: PlaceOnDevices) -> None:
        self._hosts = hosts
        self._placing = placing
        self._counter = count()
        self._model_indices = WeakKeyDictionary[nn.Module, int]()
        """Index of each model, in the order of preparation, which is the order of their messages."""
        self._quiet_models = WeakSet[nn.Module]()
        self._reached_models: set[int] = set()
        self._current_pass = -1
        """Id of the backward pass that `_reached` belongs to, as torch numbers them."""

    def apply(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ctx: ProcessContext,
        precision: Precision,
    ) -> nn.Module:
        if not request.train or not is_trainable(model) or model in self._model_indices:
            return model
        self._model_indices[model] = model_index = next(self._counter)
        trained_parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        for parameter in trained_parameters:
            parameter.register_post_accumulate_grad_hook(
                self._hook_of_model(model_index)
            )  # type: ignore[no-untyped-call]  # torch's
        gradient_sizes = []
        for parameter in trained_parameters:
            gradient_sizes.append(parameter.numel() * parameter.element_size())
        log.info(
            "xla: %d hosts average the gradients of %s through host memory, %.1f MiB to and from the devices of each at every update",
            self._hosts.size,
            type(model).__name__,
            sum(gradient_sizes) / 2**20,
        )
        return model

    def _hook_of_model(self, model_index: int) -> Callable[[Tensor], None]:
        """Return a hook that records that a backward pass reached this model, and queues `_end_pass` for the end of the pass."""
        weak_self = ref(self)

        def note_backward(parameter: Tensor) -> None:
            strategy = weak_self()
            if strategy is None:
                return
            current_pass = torch._C._current_graph_task_id()
            # a failed pass never reached its end
            if current_pass != strategy._current_pass:
                strategy._current_pass = current_pass
                strategy._reached_models = set()
                torch.autograd.Variable._execution_engine.queue_callback(
                    strategy._end_pass
                )
            strategy._reached_models.add(model_index)

        return note_backward

    def _end_pass(self) -> None:
        reached_models = self._reached_models
        self._reached_models = set()
        self._current_pass = -1
        models = []
        for model, model_index in self._model_indices.items():
            if model_index in reached_models and model not in self._quiet_models:
                models.append(model)
        if models:
            # gradients are read one by one, and each read would otherwise compile a separate program
            need("torch_xla").sync()
        for model in sorted(models, key=self._model_indices.__getitem__):
            parameters = model.parameters()
            self._average_gradients([p for p in parameters if p.requires_grad])
            buffers: list[Tensor] = []
            for module in model.modules():
                named_buffers = own_buffers(module, persistent_only=True)
                buffers += [buffer for _, buffer in named_buffers]
            self._copy_buffers(buffers)

    @torch.no_grad()
    def _average_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Replace every gradient by its mean; a host without a gradient that others have contributes zeros."""
        has_gradient = torch.tensor(
            [parameter.grad is not None for parameter in parameters], dtype=torch.uint8
        )
        has_gradient_anywhere = self._hosts.all_reduce(has_gradient, "max").tolist()
        trained_parameters = []
        for parameter, is_present in zip(
            parameters, has_gradient_anywhere, strict=True
        ):
            if is_present:
                trained_parameters.append(parameter)
        for bucket in _buckets_of(trained_parameters):
            flat_gradients = torch.cat(
                [_host_gradient(parameter).reshape(-1) for parameter in bucket]
            )
            mean = self._hosts.all_reduce(flat_gradients, "mean")
            for parameter, mean_gradient in zip(
                bucket,
                torch.split(mean, [member.numel() for member in bucket]),
                strict=True,
            ):
                parameter.grad = self._placing.send_tensor(
                    mean_gradient.view(parameter.shape)
                )

    @torch.no_grad()
    def _copy_buffers(self, buffers: list[Tensor]) -> None:
        if not buffers:
            return
        host_buffers = [buffer.cpu().contiguous() for buffer in buffers]
        first_host_bytes = self._hosts.broadcast(
            torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in host_buffers])
        )
        if self._hosts.rank == 0:
            return
        for buffer, tensor, buffer_bytes in zip(
            buffers,
            host_buffers,
            torch.split(
                first_host_bytes, [host_buffer.nbytes for host_buffer in host_buffers]
            ),
            strict=True,
        ):
            buffer.copy_(buffer_bytes.clone().view(tensor.dtype).view(tensor.shape))

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        was_quiet = model in self._quiet_models
        self._quiet_models.add(model)
        try:
            yield
        finally:
            if not was_quiet:
                self._quiet_models.discard(model)

    def join(self, models: list[nn.Module]) -> AbstractContextManager[None]:
        raise StepError(
            "join_uneven_inputs() is not supported on several XLA hosts: each host must take part in every gradient reduction. Use "
            "even_batches=True (the default), which gives every host the same number of batches."
        )


def _host_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient in host memory; zeros if there is none."""
    if parameter.grad is None:
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
    return parameter.grad.cpu()


def _buckets_of(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each message, in order: all of one dtype, and within `BUCKET_BYTES`."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        num_bytes = parameter.numel() * parameter.element_size()
        if bucket and (
            size + num_bytes > BUCKET_BYTES or parameter.dtype != bucket[0].dtype
        ):
            yield bucket
            bucket = []
            size = 0
        bucket.append(parameter)
        size += num_bytes
    if bucket:
        yield bucket


log_strategy = logging.getLogger(__name__)

VERSIONS: Final = ">=2.9,<2.10"
"""Supported releases of torch_xla; each runs only on the torch release of the same version."""
_REQUIRED_BY: Final = "strategy='xla'"


def start_xla(config: Config, topology: Topology) -> torch.device:
    """Start XLA with SPMD and return the device that represents all devices of this host.

    XLA's random numbers are seeded from torch's seed.
    Raises: MissingPackageError without a torch_xla that runs here; ConfigError if several processes were started on this host,
    if XLA would join it with other hosts, or if a setting has no effect; DeviceError after a backward pass on the CPU.
    """
    refuse_unsupported_settings(config)
    refuse_processes(topology)
    refuse_other_torch(torch.__version__)
    check_installed("torch_xla", VERSIONS, _REQUIRED_BY)
    runtime = need("torch_xla.runtime")
    refuse_hosts(runtime.device_type(), env.snapshot())
    if not runtime.is_spmd():
        runtime.use_spmd()
        need("torch_xla").manual_seed(torch.initial_seed())
    if runtime.process_count() > 1:
        raise ConfigError(tpu_hosts.joined_hosts_message(int(runtime.process_count())))
    device: torch.device = need("torch_xla").device()
    _try_backward(device)
    return device


def _try_backward(device: torch.device) -> None:
    """Record a backward pass, to detect that torch created its backward threads before XLA was started."""
    try:
        torch.ones(1, device=device, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        raise DeviceError(
            "backward() ran on the CPU before XLA was started, after which torch cannot run backward on XLA devices in this process. "
            "Create the Accelerator before the first backward()."
        ) from error


def refuse_processes(topology: Topology) -> None:
    """Raise if a host has several processes (one drives all its devices), or if hosts have no rendezvous."""
    if topology.local_world_size > 1:
        raise ConfigError(
            f"{topology.local_world_size} processes were started on this machine with strategy='xla', where one process controls all "
            "devices of a host. Start the script once on each host: `hasten launch --tpu script.py`, or `python script.py`."
        )
    if topology.source == "xla" and topology.world_size > 1:
        raise ConfigError(tpu_hosts.unjoined_hosts_message(topology.world_size))


def refuse_hosts(kind: str | None, variables: Mapping[str, str]) -> None:
    """Raise on a host of a TPU slice that is not configured as a separate XLA world, before XLA waits for the others."""
    hosts = tpu_hosts.count_hosts(variables) if kind == "TPU" else None
    if hosts is not None and hosts > 1:
        raise ConfigError(tpu_hosts.unjoined_hosts_message(hosts))


def refuse_other_torch(version: str) -> None:
    """Raise for a torch that torch_xla was not built for, which would crash at import."""
    if version.split(".")[:2] != ["2", "9"]:
        raise MissingPackageError(
            f"torch {version} is installed, but torch_xla{VERSIONS} needs torch 2.9. Create a separate environment for TPUs; "
            "docs/tpu.md has the commands."
        )


def refuse_unsupported_settings(config: Config) -> None:
    """Raise for settings that would have no effect under torch_xla."""
    for name, is_set, remedy in (
        (
            "cpu",
            config.cpu,
            "XLA chooses the device; remove it, and set PJRT_DEVICE=CPU to test XLA on the CPU",
        ),
        (
            "dynamo.backend",
            config.dynamo.backend != "no",
            "XLA always compiles every step; remove it",
        ),
        (
            "recompute",
            bool(config.recompute),
            "it was not tested with XLA; remove it, or set xla.fsdp_v2",
        ),
        (
            "the section ddp",
            bool(given(config.ddp)),
            "XLA reduces gradients; remove it",
        ),
        (
            "performance",
            bool(given(config.performance)),
            "its optimizations are for other devices; remove it",
        ),
    ):
        if is_set:
            raise ConfigError(f"{name} is not supported with strategy='xla': {remedy}.")


def create_strategy(config: Config, ctx: ProcessContext) -> NativeStrategy:
    """Return the strategy for XLA: parameters are replicated over devices, or sharded with `xla.fsdp_v2`.

    The compiler reduces gradients over the devices of a host. Raises: ConfigError for settings that have no effect.
    """
    refuse_unsupported_settings(config)
    if ctx.mesh.size(Axis.DP_SHARD) > 1:
        raise ConfigError(
            f"dp_shard_size={ctx.mesh.size(Axis.DP_SHARD)} shards parameters over hosts, but strategy='xla' only shards them over the "
            "devices of each host. Remove it, and set xla.fsdp_v2."
        )
    devices = Devices.all()
    shards_parameters = config.section(XLAConfig).fsdp_v2
    if shards_parameters:
        placement = "sharded over them (FSDPv2)"
    else:
        placement = "replicated on each"
    log_strategy.info(
        "xla: each batch of this process is split over %d %s device(s); parameters are %s",
        devices.count,
        devices.kind,
        placement,
    )
    placing = PlaceOnDevices(devices, shards_parameters)
    hosts = ctx.groups(*LOSS)
    has_several_hosts = hosts.size > 1
    return NativeStrategy(
        "xla",
        AcrossHosts(hosts, placing) if has_several_hosts else SingleProcess(),
        [
            *([FromFirstHost(hosts)] if has_several_hosts else []),
            placing,
            Convert(config.master_weights),
        ],
        Caps(
            synchronises=has_several_hosts,
            transfer=lambda depth, skip_keys: Transfer(devices, depth, skip_keys),
        ),
        on_optimizer=lambda optimizer: _run_after_updates(optimizer, placing),
    )


def _run_after_updates(optimizer: Optimizer, placing: PlaceOnDevices) -> None:
    """Execute the recorded operations after each update of the optimizer, and shard the state that it loads.

    One step is one program. The first program creates the optimizer's state sharded like its parameters; state that was loaded
    unsharded would lead to another program, whose sums differ by rounding.
    """
    sync = need("torch_xla").sync

    # Any: torch's signature of a hook
    def end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        sync()

    optimizer.register_step_post_hook(end)
    optimizer.register_load_state_dict_post_hook(placing.place_state)


STRATEGY: Final = OfferedStrategy(create=create_strategy, start_device=start_xla)
