"""Launch plans for SLURM and MPI-like launchers: one command per rank, or a batch script for one per machine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Final

from hasten import extension
from hasten.config.sections.launch import LaunchConfig
from hasten.errors import ConfigError
from hasten.launch.base import (
    Host,
    JobShape,
    LaunchPlan,
    LaunchRequest,
    LaunchTarget,
    PlannedFile,
    Proc,
    Submitter,
)
from hasten.launch.failure import PREEMPTED
from hasten.launch.shape import worker_argv
from hasten.launch.torchrun import supervision

# Defaults of the batch script; an option of the same name in submit_options overrides a default, false removes it.
_DEFAULTS: Final = MappingProxyType(
    {"ntasks-per-node": 1, "output": "%x-%j.log", "open-mode": "append"}
)
_SCRIPT_FLAGS: Final = (
    "--submit",
    "--submit_options",
    "--submit-options",
    "--dry-run",
    "--dry_run",
)


# srun runs in the background because bash runs a trap only between commands; `wait` returns early when the trap has run.
_TRAP: Final = """
# If SLURM signals only this shell (scancel --batch, --signal=B:USR1@120), the signal is forwarded to all machines.
told=yes step=
trap 'told=yes; kill -USR1 $step 2> /dev/null' TERM USR1
"""
_WAIT: Final = """
step=$!
while [ -n "$told" ]; do told=; wait "$step"; code=$?; done
"""
_SRUN: Final = ("srun --kill-on-bad-exit=1 --wait=60 \\",)
# Replicas on the machines that are left continue. This shell is on the same node as task 0, which is machine 0 and knows the result of the run.
_SRUN_OUTLIVING: Final = (
    "# A lost machine ends neither the others nor the job. The exit code is that of machine 0, which runs on this node.",
    "found=$(mktemp)",
    "srun --no-kill --kill-on-bad-exit=0 --wait=0 \\",
    """    bash -c 'trap : TERM USR1; "$@"; code=$?; [ "$SLURM_PROCID" != 0 ] || echo "$code" > "$0"; exit "$code"' "$found" \\""",
)
_CODE_OF_MACHINE_0: Final = (
    'if [ -s "$found" ]; then code=$(cat "$found"); fi; rm -f "$found"',
)
_REQUEUE: Final = f"""
# {PREEMPTED}: the program ended by itself after a signal, so it has saved. It is requeued and continues from there; a cancelled job is not requeued.
# 138 and 143: it was stopped before it could save, which is not a failure if SLURM preempted the job.
job=$SLURM_JOB_ID
if [ -n "${{SLURM_ARRAY_TASK_ID:-}}" ]; then job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID; fi
case "$code" in {PREEMPTED} | 138 | 143) known=$(scontrol show job "$job") ;; *) exit "$code" ;; esac
case "$code: $known" in
    {PREEMPTED}:*JobState=COMPLETING*Reason=TimeLimit*) scontrol requeue "$job" ;;
    {PREEMPTED}:*JobState=COMPLETING*PreemptTime=None* | *JobState=CANCELLED*) ;;
    {PREEMPTED}:*) scontrol requeue "$job" ;;
    138:*PreemptTime=[0-9]* | 143:*PreemptTime=[0-9]*) scontrol requeue "$job" ;;
esac
"""


def plan_task(request: LaunchRequest, host: Host, shape: JobShape) -> LaunchPlan:
    """Return the plan of one rank that srun or mpirun has started."""
    topology = shape.allocation.rank
    assert topology is not None, "the cluster started one command per rank"
    if topology.local_world_size > max(host.num_devices, 1) and not shape.use_cpu:
        raise ConfigError(
            f"{shape.allocation.source} started {topology.local_world_size} ranks on {host.name}, which has "
            f"{host.num_devices} usable devices. Start one per device, or one per machine and let hasten start the rest."
        )
    launch_settings = request.config.launch
    if (
        launch_settings.num_processes is not None
        and launch_settings.num_processes != topology.world_size
    ):
        raise ConfigError(
            f"num_processes={launch_settings.num_processes}, but {shape.allocation.source} started {topology.world_size} ranks. "
            f"Remove num_processes, or make them agree."
        )
    address, _, port = topology.meeting_point().removeprefix("tcp://").rpartition(":")
    if launch_settings.main_process_ip is not None:
        address = launch_settings.main_process_ip
    rank_variables = {
        **dict(shape.env),
        "RANK": str(topology.rank),
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_RANK": str(topology.local_rank),
        "LOCAL_WORLD_SIZE": str(topology.local_world_size),
        "GROUP_RANK": str(topology.node_rank),
        "MASTER_ADDR": address.strip("[]"),
        "MASTER_PORT": str(launch_settings.main_process_port or port),
    }
    num_threads = max(1, host.cores // topology.local_world_size)
    if "OMP_NUM_THREADS" not in host.env:
        rank_variables.setdefault("OMP_NUM_THREADS", str(num_threads))
    return LaunchPlan(
        launcher="task",
        procs=(Proc(worker_argv(request.target, host), rank_variables),),
        notes=shape.notes[:1],
        supervision=supervision(request, shape),
        target=request.target,
    )


def plan_submit(request: LaunchRequest, host: Host) -> LaunchPlan:
    """Return a batch script that runs this command on every machine of a new job, and the command that submits it."""
    launch_settings = request.config.launch
    extension_targets: list[LaunchTarget] = []
    for offer in extension.offers("launch_targets").values():
        extension_targets.append(offer.load())
    outlives_machines = any(
        target.outlives_machines is not None and target.outlives_machines(request)
        for target in extension_targets
    )
    user_options = _dashed_options(launch_settings.submit_options)
    if (
        "nodes" in user_options
        and str(user_options["nodes"])
        != (requested_nodes := _node_range(launch_settings))
        and requested_nodes != "1"
    ):
        raise ConfigError(
            f"submit_options nodes={user_options['nodes']} contradicts num_machines={requested_nodes}: the job would wait for machines that are not "
            "reserved, or reserve machines that it does not use. Remove nodes."
        )
    job_name = re.sub(r"[^\w.-]", "-", PurePath(request.target.name).stem) or "hasten"
    batch_options: dict[str, Any] = {
        "job-name": job_name,
        "nodes": _node_range(launch_settings),
        **_DEFAULTS,
        **user_options,
    }
    batch_options.setdefault("requeue", not batch_options.get("no-requeue"))
    if outlives_machines:
        batch_options.setdefault("no-kill", True)
    launch_command = [
        host.python,
        "-m",
        "hasten.cli.main",
        "launch",
        *without_submit(request.flags),
    ]
    script_lines = [
        "#!/bin/bash",
        *_directive_lines(batch_options),
        "",
        f"cd {shlex.quote(request.folder)} || exit",
        *_TRAP.splitlines(),
        "",
    ]
    script_lines += [
        "# One command per machine; ranks, addresses and devices are read from SLURM and the machine.",
        *(_SRUN_OUTLIVING if outlives_machines else _SRUN),
        f"    {shlex.join(launch_command)} \\",
        f"    {shlex.join([request.target.name, *request.target.args])} &",
        *_WAIT.splitlines()[1:],
        *(_CODE_OF_MACHINE_0 if outlives_machines else ()),
        *(_REQUEUE.splitlines() if batch_options["requeue"] else []),
        'exit "$code"',
    ]
    script_path = f"{job_name}.sbatch"
    return LaunchPlan(
        launcher="slurm",
        procs=(Proc(("sbatch", script_path)),),
        notes=(
            f"the script requests one task per machine; hasten starts {'its processes' if outlives_machines else 'one process per device'}",
        ),
        submitter=Submitter("sbatch", "add --dry-run to see the script"),
        files=(
            PlannedFile(script_path, "\n".join(script_lines) + "\n", executable=True),
        ),
        supervision=supervision(request, JobShape(num_processes=1)),
        target=request.target,
    )


TARGET: Final = LaunchTarget(
    name="slurm",
    is_chosen=lambda request: request.config.launch.submit == "slurm",
    plan=plan_submit,
)


def without_submit(flags: tuple[str, ...]) -> list[str]:
    """Return the options as typed, without those that request the batch script."""
    launch_words: list[str] = []
    skips_next = False
    for flag_word in flags:
        if skips_next:
            skips_next = False
            continue
        flag_name, equals, _ = flag_word.partition("=")
        if flag_name in _SCRIPT_FLAGS:
            skips_next = not equals and "dry" not in flag_name
            continue
        launch_words.append(flag_word)
    return launch_words


def _node_range(launch_settings: LaunchConfig) -> str:
    if launch_settings.nnodes:
        return launch_settings.nnodes.replace(":", "-")
    return str(launch_settings.num_machines)


def _dashed_options(options: Mapping[str, Any]) -> dict[str, Any]:
    dashed_options = {}
    for option_name, option_value in options.items():
        dashed_options[option_name.strip("-").replace("_", "-")] = option_value
    return dashed_options


def _directive_lines(options: Mapping[str, Any]) -> list[str]:
    """Return the #SBATCH lines; true is an option without value, false and None omit the option."""
    directive_lines = []
    for option_name, option_value in options.items():
        if option_value is None or option_value is False:
            continue
        if not f"{option_name}{option_value}".isprintable():
            raise ConfigError(
                f"submit_options: {option_name}={option_value!r} contains a character that would end its #SBATCH line, and what follows would be read as "
                f"another one; remove it."
            )
        directive_lines.append(
            f"#SBATCH --{option_name}"
            if option_value is True
            else f"#SBATCH --{option_name}={option_value}"
        )
    return directive_lines
