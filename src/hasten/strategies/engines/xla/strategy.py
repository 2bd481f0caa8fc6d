"""Training on TPUs through torch_xla: one process per host drives all its devices, which share each batch (SPMD)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.optim import Optimizer

from hasten.config.base import given
from hasten.config.root import Config
from hasten.errors import ConfigError, DeviceError, MissingPackageError
from hasten.optional import check_installed, need
from hasten.runtime import env, tpu_hosts
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import LOSS, Axis
from hasten.runtime.topology import Topology
from hasten.strategies.base import Caps
from hasten.strategies.engines.xla.hosts import AcrossHosts, FromFirstHost
from hasten.strategies.engines.xla.placing import Devices, PlaceOnDevices, Transfer
from hasten.strategies.native import Alone, NativeStrategy
from hasten.strategies.placing import Convert

log = logging.getLogger(__name__)

VERSIONS: Final = ">=2.9,<2.10"
"""Supported releases of torch_xla; each runs only on the torch release of the same version."""
_WHY: Final = "strategy='xla'"


def start(config: Config, topology: Topology) -> torch.device:
    """Start XLA with SPMD and return the device that represents all devices of this host.

    XLA's random numbers are seeded from torch's seed.
    Raises: MissingPackageError without a torch_xla that runs here; ConfigError if several processes were started on this host,
    if XLA would join it with other hosts, or if a setting has no effect; DeviceError after a backward pass on the CPU.
    """
    refuse(config)
    refuse_processes(topology)
    refuse_other_torch(torch.__version__)
    check_installed("torch_xla", VERSIONS, _WHY)
    runtime = need("torch_xla.runtime")
    refuse_hosts(runtime.device_type(), env.snapshot())
    if not runtime.is_spmd():
        runtime.use_spmd()
        need("torch_xla").manual_seed(torch.initial_seed())
    if runtime.process_count() > 1:
        raise ConfigError(tpu_hosts.joined(int(runtime.process_count())))
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
        raise ConfigError(tpu_hosts.refusal(topology.world_size))


def refuse_hosts(kind: str | None, variables: Mapping[str, str]) -> None:
    """Raise on a host of a TPU slice that is not configured as a separate XLA world, before XLA waits for the others."""
    hosts = tpu_hosts.count(variables) if kind == "TPU" else None
    if hosts is not None and hosts > 1:
        raise ConfigError(tpu_hosts.refusal(hosts))


def refuse_other_torch(version: str) -> None:
    """Raise for a torch that torch_xla was not built for, which would crash at import."""
    if version.split(".")[:2] != ["2", "9"]:
        raise MissingPackageError(
            f"torch {version} is installed, but torch_xla{VERSIONS} needs torch 2.9. Create a separate environment for TPUs; "
            "docs/engines.md has the commands."
        )


def refuse(config: Config) -> None:
    """Raise for settings that would have no effect under torch_xla."""
    for name, set_, instead in (
        (
            "cpu",
            config.cpu,
            "XLA chooses the device; remove it, and set PJRT_DEVICE=CPU to test XLA on the CPU",
        ),
        ("dynamo.backend", config.dynamo.backend != "no", "XLA always compiles every step; remove it"),
        ("recompute", bool(config.recompute), "it was not tested with XLA; remove it, or set xla.fsdp_v2"),
        ("the section ddp", bool(given(config.ddp)), "XLA reduces gradients; remove it"),
        ("performance", bool(given(config.performance)), "its optimizations are for other devices; remove it"),
    ):
        if set_:
            raise ConfigError(f"{name} is not supported with strategy='xla': {instead}.")


def strategy(config: Config, ctx: ProcessContext) -> NativeStrategy:
    """Return the strategy for XLA: parameters are replicated over devices, or sharded with `xla.fsdp_v2`.

    The compiler reduces gradients over the devices of a host. Raises: ConfigError for settings that have no effect.
    """
    refuse(config)
    if ctx.mesh.size(Axis.DP_SHARD) > 1:
        raise ConfigError(
            f"dp_shard_size={ctx.mesh.size(Axis.DP_SHARD)} shards parameters over hosts, but strategy='xla' only shards them over the "
            "devices of each host. Remove it, and set xla.fsdp_v2."
        )
    devices = Devices.all()
    log.info(
        "xla: each batch of this process is split over %d %s device(s); parameters are %s",
        devices.count,
        devices.kind,
        "sharded over them (FSDPv2)" if config.xla.fsdp_v2 else "replicated on each",
    )
    placing = PlaceOnDevices(devices, config.xla.fsdp_v2)
    hosts = ctx.groups(*LOSS)
    several = hosts.size > 1
    return NativeStrategy(
        "xla",
        AcrossHosts(hosts, placing) if several else Alone(retries=False),
        [*([FromFirstHost(hosts)] if several else []), placing, Convert(config.master_weights)],
        Caps(synchronises=several, transfer=lambda depth, skip_keys: Transfer(devices, depth, skip_keys)),
        on_optimizer=lambda optimizer: _follow(optimizer, placing),
    )


def _follow(optimizer: Optimizer, placing: PlaceOnDevices) -> None:
    """Execute the recorded operations after each update of the optimizer, and shard the state that it loads.

    One step is one program. The first program creates the optimizer's state sharded like its parameters; state that was loaded
    unsharded would lead to another program, whose sums differ by rounding.
    """
    sync = need("torch_xla").sync

    def end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # Any: torch's signature of a hook
        sync()

    optimizer.register_step_post_hook(end)
    optimizer.register_load_state_dict_post_hook(placing.place_state)
