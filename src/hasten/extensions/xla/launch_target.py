"""Launch plans for TPU jobs: one process on each TPU VM, or one command on all VMs of a named TPU through gcloud."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from hasten.config.sections.launch import LaunchConfig
from hasten.errors import ConfigError
from hasten.extensions.xla import tpu_hosts
from hasten.extensions.xla.settings import XLAConfig
from hasten.extensions.xla.tpu_hosts import TpuSlice
from hasten.launch import torchrun
from hasten.launch.base import (
    Host,
    JobShape,
    LaunchPlan,
    LaunchRequest,
    LaunchTarget,
    Proc,
)
from hasten.launch.cluster.slurm import without_submit
from hasten.launch.shape import worker_argv
from hasten.runtime.topology import is_single_tpu_process

_ONE_VM: Final = re.compile(r"(?!all$)(?!\d+-\d+$)[^,]+")
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*=")
_POD_FLAGS: Final = (
    "--tpu_cluster",
    "--tpu-cluster",
    "--tpu_use_cluster",
    "--tpu-use-cluster",
)


def plan_machine(
    launch_request: LaunchRequest, host: Host, job_shape: JobShape
) -> LaunchPlan | None:
    """Return a plan with one process that drives all devices of this VM, and a rendezvous for several machines; None for other devices.

    Raises: ConfigError when more processes were requested, the machine has no TPU and PJRT_DEVICE names no other device, or the TPU has
    several hosts and the job one machine.
    """
    if not _is_for_tpus(launch_request, host):
        return None
    launch = launch_request.config.launch
    machines = job_shape.max_machines
    tpu = host.tpu
    requested_processes = (
        launch.processes_per_machine or (launch.num_processes or machines) // machines
    )
    if requested_processes > 1:
        raise ConfigError(
            f"{requested_processes} processes on each of {machines} machine(s) were requested on TPUs, where one process controls all devices of a "
            "machine. Remove num_processes."
        )
    if launch_request.target.no_python:
        raise ConfigError(
            "--no_python cannot be combined with a TPU: the program must be a Python script. Leave it out."
        )
    device = host.env.get("PJRT_DEVICE") or ("TPU" if host.device == "tpu" else None)
    if device is None:
        raise ConfigError(
            f"training on TPUs was requested, but {host.name} has none. Start it on a TPU VM, or set PJRT_DEVICE=CPU to test it without "
            "a TPU."
        )
    if device == "TPU" and machines == 1 and tpu is not None and tpu.hosts > 1:
        raise ConfigError(tpu_hosts.unjoined_hosts_message(tpu.hosts))
    env = {
        **{name: value for name, value in job_shape.env if name != "OMP_NUM_THREADS"},
        "PJRT_DEVICE": device,
    }
    if device == "TPU" and host.num_devices:
        driven_devices = f"its {host.num_devices} TPU devices"
    else:
        driven_devices = f"all {device} devices"
    if machines > 1:
        if device == "TPU":
            separate_world = tpu_hosts.variables_of_single_host(
                host.env, host.num_devices
            )
        else:
            separate_world = {}
        note = f"one process controls {driven_devices}; the machines average gradients through host memory"
        variables = tuple(sorted({**env, **separate_world}.items()))
        rank = _machine_rank(job_shape, tpu)
        return torchrun.plan(
            launch_request,
            host,
            replace(
                job_shape,
                num_processes=1,
                machine_rank=rank,
                env=variables,
                notes=(note,),
            ),
        )
    return LaunchPlan(
        launcher="single",
        procs=(Proc(worker_argv(launch_request.target, host), env),),
        notes=(
            f"one process controls {driven_devices}, and each batch is split over them",
        ),
        supervision=torchrun.supervision(launch_request, job_shape),
        target=launch_request.target,
    )


def _is_for_tpus(launch_request: LaunchRequest, host: Host) -> bool:
    config = launch_request.config
    launch = launch_request.config.launch
    if launch.launcher != "auto":
        return launch.launcher == "xla"
    on_tpu = host.device == "tpu" and not config.cpu and config.strategy == "auto"
    return launch.tpu or config.strategy == "xla" or on_tpu


def _machine_rank(job_shape: JobShape, tpu: TpuSlice | None) -> int | None:
    """Return this machine's rank: the given one, else its worker index; None if the rendezvous assigns it."""
    if job_shape.machine_rank is not None or tpu is None or tpu.worker is None:
        return job_shape.machine_rank
    if tpu.worker >= job_shape.max_machines:
        raise ConfigError(
            f"this machine is host {tpu.worker} of its TPU slice, and num_machines={job_shape.max_machines} counts from 0. Set num_machines to the "
            "number of hosts, or give --machine_rank on each to train on some of them."
        )
    return tpu.worker


def is_pod(launch_request: LaunchRequest) -> bool:
    """Return whether the job runs on the VMs of a named TPU."""
    return (
        launch_request.config.launch.tpu
        and launch_request.config.section(XLAConfig).tpu_use_cluster
    )


def plan_pod(launch_request: LaunchRequest, host: Host) -> LaunchPlan:
    """Return a plan that runs the same hasten command on the VMs of a named TPU through gcloud.

    Raises: ConfigError without a TPU name, for a subset of several VMs, or for a command file that cannot be read.
    """
    xla = launch_request.config.section(XLAConfig)
    tpu = host.tpu
    if not xla.tpu_name:
        raise ConfigError(
            "a TPU of other machines is reached by its name. Give --tpu_name (and --tpu_zone)."
        )
    worker = ",".join(xla.tpu_vm or ("all",))
    env = _parse_variables(xla.tpu_env or ())
    _refuse_subset(xla.tpu_name, worker, tpu, is_single_tpu_process(env))
    flags = []
    for flag in without_submit(launch_request.flags):
        if flag not in _POD_FLAGS:
            flags.append(flag)
    if tpu is not None and tpu.hosts > 1 and worker == "all":
        flags += _rendezvous_flags(launch_request.config.launch, xla.tpu_name, tpu)
    command = shlex.join(
        [
            "hasten",
            "launch",
            *flags,
            launch_request.target.name,
            *launch_request.target.args,
        ]
    )
    assignments = [f"{name}={value}" for name, value in env.items()]
    exports = "".join(
        f"export {shlex.quote(assignment)}; " for assignment in assignments
    )
    setup = "".join(
        f"{line}; " for line in (*_commands_of(xla.command_file), *(xla.commands or ()))
    )
    # sudo does not pass on the variables exported before it
    sudo = ""
    if xla.tpu_use_sudo:
        sudo = (
            shlex.join(["sudo", *(["env", *assignments] if assignments else [])]) + " "
        )
    argv = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", xla.tpu_name]
    argv += ["--zone", xla.tpu_zone] if xla.tpu_zone else []
    argv += ["--worker", worker, "--command", f"{exports}{setup}{sudo}{command}"]
    return LaunchPlan(
        launcher="xla",
        procs=(Proc(tuple(argv)),),
        notes=(_note_of_slice(xla.tpu_name, worker, tpu),),
        target=launch_request.target,
    )


def _note_of_slice(name: str, worker: str, tpu: TpuSlice | None) -> str:
    if tpu is None:
        return "gcloud did not report the number of hosts; if there are several, training raises an error"
    if tpu.hosts > 1 and worker == "all":
        numbering = "; each determines its number itself"
    else:
        numbering = ""
    return f"{name} has {tpu.hosts} host(s), according to gcloud{numbering}"


def _rendezvous_flags(launch: LaunchConfig, name: str, tpu: TpuSlice) -> list[str]:
    """Return the rendezvous flags of the VMs.

    Raises: ConfigError for flags that contradict the TPU, or if the address of the first VM is unknown.
    """
    if launch.machine_rank is not None or launch.num_machines not in (1, tpu.hosts):
        if launch.machine_rank is None:
            given_flag = f"num_machines={launch.num_machines}"
        else:
            given_flag = f"machine_rank={launch.machine_rank}"
        raise ConfigError(
            f"{given_flag} was given for the TPU {name!r}, whose {tpu.hosts} hosts all run the same command and determine their numbers "
            "themselves. Remove it."
        )
    if launch.main_process_ip is None and tpu.first is None:
        raise ConfigError(
            f"gcloud reports no address for the first of {tpu.hosts} hosts of the TPU {name!r}. Give --main_process_ip."
        )
    if launch.num_machines > 1:
        machine_flags = []
    else:
        machine_flags = ["--num_machines", str(tpu.hosts)]
    if launch.main_process_ip is None and tpu.first:
        address_flags = ["--main_process_ip", tpu.first]
    else:
        address_flags = []
    return [
        *machine_flags,
        *address_flags,
    ]


def _refuse_subset(
    name: str, worker: str, tpu: TpuSlice | None, is_separate_world: bool
) -> None:
    """Raise if a subset of a TPU's VMs was selected, which would wait for the others."""
    if _ONE_VM.fullmatch(worker) is None and worker != "all":
        raise ConfigError(
            f"--vm names several VMs ({worker}), but starting several, but not all, VMs of a TPU is not supported in this version. Name "
            "one, or remove --vm to train on all."
        )
    if tpu is not None and tpu.hosts > 1 and worker != "all" and not is_separate_world:
        raise ConfigError(
            f"--vm {worker} names one of {tpu.hosts} hosts of the TPU {name!r}, where XLA would wait for the others. Remove --vm to "
            "train on all, or add --env TPU_PROCESS_BOUNDS=1,1,1 to use only this one."
        )


def _parse_variables(items: Iterable[str]) -> dict[str, str]:
    """Return the variables in a list that was split at commas; an item without a name continues the previous value.

    Raises: ConfigError for a first item without a name.
    """
    variables: dict[str, str] = {}
    for item in items:
        if _ASSIGNMENT.match(item):
            name, _, value = item.partition("=")
            variables[name] = value
        elif variables:
            variables[list(variables)[-1]] += f",{item}"
        else:
            raise ConfigError(
                f"tpu_env={item!r} sets no variable on the TPU VMs; write --env NAME=VALUE."
            )
    return variables


def _commands_of(command_file: str | None) -> list[str]:
    """Return the commands in a file, one per line."""
    if command_file is None:
        return []
    try:
        text = Path(command_file).read_text()
    except OSError as error:
        raise ConfigError(
            f"tpu_command_file={command_file!r} cannot be read: {error.strerror}. Correct the path, or remove it."
        ) from error
    commands = []
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            commands.append(line)
    return commands


_GCLOUD_TIMEOUT_S: Final = 60.0


def find_slice(launch_request: LaunchRequest, host: Host) -> Host:
    """Return the host with the machines of its TPU."""
    return replace(host, tpu=_find_slice(launch_request, host))


def _find_slice(launch_request: LaunchRequest, host: Host) -> TpuSlice | None:
    """Return the hosts of the TPU; None for a job without TPUs, or if they are unknown."""
    launch = launch_request.config.launch
    xla = launch_request.config.section(XLAConfig)
    if is_pod(launch_request):
        if xla.tpu_name and "gcloud" in host.programs:
            return _ask_gcloud(xla.tpu_name, xla.tpu_zone)
        return None
    device = host.env.get("PJRT_DEVICE") or ("TPU" if host.device == "tpu" else None)
    if device != "TPU" or launch_request.config.cpu:
        return None
    # this machine's worker index is only needed if no rank was given
    if launch.num_machines > 1:
        worker_index = None
        if launch.machine_rank is None:
            worker_index = tpu_hosts.worker_index(host.env)
        return TpuSlice(
            launch.num_machines,
            worker=worker_index,
        )
    hosts = tpu_hosts.count_hosts(host.env)
    return None if hosts is None else TpuSlice(hosts)


def _ask_gcloud(name: str, zone: str | None) -> TpuSlice | None:
    """Return the network endpoints of a TPU, one per host; None if gcloud fails (running the plan shows its error)."""
    command = [
        "gcloud",
        "compute",
        "tpus",
        "tpu-vm",
        "describe",
        name,
        "--format",
        "json(networkEndpoints)",
        "--quiet",
    ]
    command += ["--zone", zone] if zone else []
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_GCLOUD_TIMEOUT_S,
            check=True,
        )
        endpoints = json.loads(process.stdout)["networkEndpoints"]
        if endpoints:
            return TpuSlice(len(endpoints), endpoints[0].get("ipAddress"))
        return None
    except (
        OSError,
        subprocess.SubprocessError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ):
        return None


TARGET: Final = LaunchTarget(
    name="xla",
    is_chosen=is_pod,
    plan=plan_pod,
    survey=find_slice,
    runs_in_image=True,
    plan_machine=plan_machine,
)
