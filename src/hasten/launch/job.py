"""Preparation of a launch from its command line: settings, target, machine and plan, up to the start of processes."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, assert_never, cast

from hasten.config import absent, handoff
from hasten.config.effective import effective
from hasten.config.resolve import Resolved
from hasten.config.root import Config
from hasten.config.sections.launch import LaunchConfig
from hasten.config.source import SettingEntry
from hasten.errors import ConfigError, MissingPackageError
from hasten.launch import replicas, slurm, torchrun, xla
from hasten.launch.base import Host, LaunchPlan, LaunchRequest, PlannedFile, Proc, Target, look
from hasten.launch.run import complete, execute
from hasten.launch.shape import JobShape, check_memory, decide, elsewhere, worker_argv
from hasten.launch.torchrun import supervision
from hasten.optional import check_installed
from hasten.runtime.bytes_plan import outlook
from hasten.runtime.mesh_plan import Axis, mesh_of, mesh_table, mesh_title, shards_parameters
from hasten.runtime.secret import TOKEN
from hasten.runtime.topology import DEFAULT_PORT
from hasten.runtime.tpu_hosts import TpuSlice

_ENV_FILE = ".hasten_deepspeed_env"


@dataclass(frozen=True, slots=True)
class Mpi:
    """The installed MPI implementation and the hosts in the hostfile."""

    kind: str = "openmpi"
    """openmpi, or mpich (also Intel MPI, MVAPICH and Cray, which share the options used here)."""
    hosts: tuple[str, ...] = ()


def plan_mpi(request: LaunchRequest, host: Host, mpi: Mpi) -> LaunchPlan:
    """Return a plan with one mpirun command that starts every rank; each rank reads its position from MPI's variables.

    Raises: ConfigError without a number of processes or a rendezvous address.
    """
    launch = request.config.launch
    machines = launch.num_machines if launch.num_machines > 1 else max(1, len(mpi.hosts))
    total = launch.num_processes or (launch.processes_per_machine or 0) * machines
    if not total:
        raise ConfigError("mpirun needs the number of processes over all machines. Give --num_processes.")
    if total % machines:
        raise ConfigError(f"num_processes={total} cannot be split evenly over {machines} machines. Change one of them.")
    address = launch.main_process_ip or (mpi.hosts[0] if mpi.hosts else None)
    if address is None and machines > 1:
        raise ConfigError(
            f"{machines} machines need a rendezvous address. Give --main_process_ip, or --mpirun_hostfile, "
            f"whose first host is used."
        )
    per_machine = total // machines
    if machines == 1 and not mpi.hosts:
        check_memory(host, total)
    shape = elsewhere(request, host, per_machine)
    env = {
        **dict(shape.env),
        "MASTER_ADDR": address or "127.0.0.1",
        "MASTER_PORT": str(launch.main_process_port or DEFAULT_PORT),
    }
    if launch.mpirun_ccl is not None:
        env["CCL_WORKER_COUNT"] = str(launch.mpirun_ccl)
    argv = (
        *_mpirun(mpi, launch.mpirun_hostfile, total, per_machine, env),
        *worker_argv(request.target, host, "hasten.launch.task"),
    )
    return LaunchPlan(
        launcher="mpi",
        procs=(Proc(argv),),
        notes=(f"{total} processes, {per_machine} on each machine ({machines}), by {mpi.kind}", *shape.notes),
        supervision=supervision(request, shape),
        target=request.target,
    )


def _mpirun(mpi: Mpi, hostfile: str | None, total: int, per_machine: int, env: dict[str, str]) -> list[str]:
    if mpi.kind == "openmpi":
        hosts = ["--hostfile", hostfile] if hostfile else []
        variables = [word for name, value in sorted(env.items()) for word in ("-x", f"{name}={value}")]
        variables += ["-x", TOKEN]  # by name: other users can read a command line. MPICH forwards the whole environment
        return [
            "mpirun",
            *hosts,
            "-n",
            str(total),
            "--map-by",
            f"ppr:{per_machine}:node",
            "--bind-to",
            "none",
            *variables,
        ]
    hosts = ["-f", hostfile] if hostfile else []
    variables = [word for name, value in sorted(env.items()) for word in ("-genv", name, value)]
    return ["mpirun", *hosts, "-n", str(total), "-ppn", str(per_machine), *variables]


def read_hostfile(text: str) -> tuple[str, ...]:
    """Return the host names of an MPI or DeepSpeed hostfile: first word of each line, without `:slots`."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return tuple(line.split()[0].partition(":")[0] for line in lines if line)


def kind_of(version_text: str) -> str:
    """Return the MPI implementation that printed `version_text`."""
    return "openmpi" if "open mpi" in version_text.lower() or "open-mpi" in version_text.lower() else "mpich"


def plan_deepspeed(request: LaunchRequest, host: Host) -> LaunchPlan:
    """Return a plan with one `deepspeed` command, which starts the machines of the hostfile through pdsh, MPI or SLURM.

    Raises: ConfigError without a hostfile, or with settings DeepSpeed's launcher has no option for.
    """
    launch, engine = request.config.launch, request.config.deepspeed
    if engine.hostfile is None:
        raise ConfigError(
            f"deepspeed.multinode_launcher={engine.multinode_launcher!r} needs a hostfile. Give --deepspeed_hostfile, or use the "
            "standard launcher (the same hasten command on each machine)."
        )
    if launch.max_restarts:
        raise ConfigError("DeepSpeed's launcher cannot restart processes. Use the standard launcher with max_restarts.")
    if request.target.no_python and request.target.module:
        raise ConfigError("--module and --no_python contradict each other: a module needs Python. Give one of them.")
    per_machine = launch.processes_per_machine
    if per_machine is None and launch.num_processes is not None:
        per_machine = launch.num_processes // launch.num_machines
    shape = elsewhere(request, host, per_machine or max(1, host.num_devices))
    options = ["--hostfile", engine.hostfile, "--launcher", engine.multinode_launcher]
    options += ["--include", engine.inclusion_filter] if engine.inclusion_filter else []
    options += ["--exclude", engine.exclusion_filter] if engine.exclusion_filter else []
    if launch.num_machines > 1:
        options += ["--num_nodes", str(launch.num_machines)]
    if per_machine is not None and not engine.inclusion_filter and not engine.exclusion_filter:
        options += ["--num_gpus", str(per_machine)]
    if launch.main_process_ip:
        options += ["--master_addr", launch.main_process_ip]
    options += ["--master_port", str(launch.main_process_port or DEFAULT_PORT), "--no_local_rank"]
    options += ["--module"] if request.target.module else []
    options += ["--no_python"] if request.target.no_python else []
    remote = "".join(f"{name}={value}\n" for name, value in shape.env)
    return LaunchPlan(
        launcher="deepspeed",
        procs=(Proc(("deepspeed", *options, request.target.name, *request.target.args), {"DS_ENV_FILE": _ENV_FILE}),),
        notes=(
            f"DeepSpeed's launcher starts the other machines; {_ENV_FILE} passes the settings to them",
            *shape.notes,
        ),
        files=(PlannedFile(_ENV_FILE, remote),),
        supervision=supervision(request, shape),
        target=request.target,
    )


OwnLauncher = Literal["single", "torchrun", "task", "xla"]

_ENGINES: Final = MappingProxyType({"deepspeed": "deepspeed", "megatron": "megatron", "xla": "torch_xla"})
"""Packages required by strategies, by strategy name."""


@dataclass(frozen=True, slots=True)
class Job:
    """A prepared launch: request, resolved settings, host and plan."""

    request: LaunchRequest
    resolved: Resolved
    host: Host
    plan: LaunchPlan

    def mesh(self) -> str:
        """Return the mesh as a table, with bytes per rank; empty for pure data parallelism or an unknown world size.

        Raises: ConfigError for axis sizes that do not match the number of processes.
        """
        meeting, count = self.plan.meeting, sum(proc.count for proc in self.plan.procs)
        if meeting is None or meeting.min_machines != meeting.max_machines:
            return ""
        spec = mesh_of(self.request.config, count, count * meeting.max_machines)
        if spec.size(Axis.DP_REPLICATE) == spec.world_size and spec.ep == 1:
            return ""
        title = f"mesh: {mesh_title(spec)} = {spec.world_size} processes"
        table = [title, *("    " + row for row in mesh_table(spec, count))]
        if self.request.config.strategy in _ENGINES:  # these engines lay out their state differently
            return "\n".join([*table, ""])
        config = self.request.config
        rows = outlook(
            spec, micro_steps=config.gradient_accumulation.num_steps, sharded=shards_parameters(config, spec)
        )
        bytes_title = "each rank, for every billion parameters (float32, AdamW), between steps and in a step:"
        return "\n".join([*table, bytes_title, *("    " + row for row in rows), ""])

    def run(self) -> int:
        """Run the job to completion and return its exit code."""
        if starts_replicas(self.request.config):
            return replicas.run(self.plan, self.request.config, self.host)
        return execute(self.plan, self.request.config, self.host)


def prepare(
    words: Sequence[str],
    *,
    settings: Sequence[SettingEntry] = (),
    config_file: str | None = None,
    typed: Sequence[str] = (),
    host: Host | None = None,
) -> Job:
    """Return the job that runs `words` (a script and its arguments) under `settings`; `typed` are the flags as typed.

    Raises: ConfigError for invalid settings, or a script that does not exist.
    """
    if config_file is not None and "\0" in config_file:
        raise ConfigError(
            f"config_file={config_file!r} contains a NUL character, and no file system accepts one; remove it."
        )
    host = host or look()
    env = {name: value for name, value in host.env.items() if name != handoff.VARIABLE}
    resolved = effective(env, config_file, settings)
    absent.check(resolved.entries)
    if not resolved.config.launch.no_python:
        _check_engine(resolved.config)
    launch = resolved.config.launch
    if not words:
        raise ConfigError(
            "no script was given, so there is nothing to start: `launch [settings] script.py`. See `launch --help`."
        )
    target = Target(words[0], tuple(words[1:]), module=launch.module, no_python=launch.no_python)
    _check_script(target)
    config = resolved.config
    if starts_replicas(config):
        replicas.check(config)
        config = replace(config, launch=replace(launch, num_processes=1, launcher="single"))
    request = LaunchRequest(config, target, handoff.pack(resolved))
    plan = make_plan(
        request,
        host,
        flags=_absolute(typed),
        folder=str(Path.cwd()),
        installed_mpi=_installed_mpi(request) if uses_mpi(request) else None,
        tpu=xla.ask(request, host),
    )
    return Job(request, resolved, host, complete(plan, host.env))


def starts_replicas(config: Config) -> bool:
    """Return True if this launch starts replicas that may be lost, and is not itself one of them."""
    return config.survive.replicas > 0 and config.survive.replica is None


def _check_engine(config: Config) -> None:
    strategy, elsewhere = config.strategy, config.launch.tpu and config.xla.tpu_use_cluster
    try:
        if strategy in _ENGINES and not elsewhere:
            check_installed(_ENGINES[strategy], why=f"strategy={strategy!r}")
    except MissingPackageError as error:
        raise ConfigError(str(error)) from error


def _check_script(target: Target) -> None:
    if target.module or target.no_python:
        return
    path = Path(target.name)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise ConfigError(
            f"{target.name!r} is a folder without a __main__.py, so it cannot be run; give a script, such as "
            f"{path / 'train.py'}."
        )
    if path.exists():
        return
    folder = Path(target.name).parent
    names = [str(folder / p.name) for p in folder.glob("*.py")] if folder.is_dir() else []
    near = get_close_matches(target.name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the current folder is {Path.cwd()}."
    raise ConfigError(
        f"the script {target.name!r} does not exist; {hint} (For a module give -m, for a program --no_python.)"
    )


def _absolute(flags: Sequence[str]) -> tuple[str, ...]:
    """Return the flags with an absolute path of the settings file, because a batch job starts in another folder."""
    words = list(flags)
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in ("--config_file", "--config-file"):
            if equals:
                words[index] = f"{name}={Path(value).absolute()}"
            elif index + 1 < len(words):
                words[index + 1] = str(Path(words[index + 1]).absolute())
    return tuple(words)


def _installed_mpi(request: LaunchRequest) -> Mpi:
    """Return the installed MPI implementation and the hosts in the hostfile."""
    hostfile = request.config.launch.mpirun_hostfile
    try:
        hosts = read_hostfile(Path(hostfile).read_text()) if hostfile else ()
    except OSError as error:
        raise ConfigError(f"mpirun_hostfile={hostfile!r} cannot be read: {error.strerror}.") from error
    try:
        done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):  # not installed here: the plan can still be shown
        return Mpi(hosts=hosts)
    return Mpi(kind_of(done.stdout + done.stderr), hosts)


def make_plan(
    request: LaunchRequest,
    host: Host,
    *,
    flags: tuple[str, ...] = (),
    folder: str = ".",
    installed_mpi: Mpi | None = None,
    tpu: TpuSlice | None = None,
) -> LaunchPlan:
    """Return the plan for `request` on `host`.

    `flags` are the command-line options as typed, for plans that repeat the command on other machines. `tpu` describes the TPU's hosts,
    if known.

    Raises: ConfigError for settings that contradict each other or this machine.
    """
    config = request.config
    if config.launch.submit == "slurm":
        return slurm.plan_submit(request, host, flags, folder)
    if config.launch.tpu and config.xla.tpu_use_cluster:
        return xla.plan_pod(request, flags, tpu)
    if uses_mpi(request):
        return plan_mpi(request, host, installed_mpi or Mpi())
    if _uses_deepspeed(request):
        return plan_deepspeed(request, host)
    shape = decide(request, host)
    name = _launcher(request, host, shape)
    match name:
        case "single":
            return torchrun.plan_single(request, host, shape)
        case "torchrun":
            return torchrun.plan(request, host, shape)
        case "task":
            return slurm.plan_task(request, host, shape)
        case "xla":
            return xla.plan(request, host, shape, tpu)
        case other:
            assert_never(other)


def uses_mpi(request: LaunchRequest) -> bool:
    """Return whether the plan is an mpirun command, in which case the installed MPI must be detected."""
    launch = request.config.launch
    return launch.launcher == "mpi" or (launch.launcher == "auto" and launch.mpirun_hostfile is not None)


def _uses_deepspeed(request: LaunchRequest) -> bool:
    launch, config = request.config.launch, request.config
    named = config.strategy == "deepspeed" and config.deepspeed.multinode_launcher != "standard"
    return launch.launcher == "deepspeed" or (launch.launcher == "auto" and named)


def _launcher(request: LaunchRequest, host: Host, shape: JobShape) -> OwnLauncher:
    config, launch = request.config, request.config.launch
    if launch.launcher == "slurm" and shape.allocation.rank is None:
        if not shape.allocation.source:
            raise ConfigError(
                "launcher=slurm reads its ranks from SLURM, but srun did not start this command. "
                "Start it with srun, or write a batch script with --submit slurm."
            )
        return "torchrun"
    if launch.launcher == "single" and (shape.num_processes > 1 or shape.max_machines > 1):
        raise ConfigError(
            f"launcher=single starts one process, but {shape.num_processes} on {shape.max_machines} machine(s) were requested. "
            f"Remove launcher, or set num_processes to 1."
        )
    if shape.allocation.rank is not None:
        return "task"
    if launch.launcher in ("single", "torchrun", "xla"):
        return cast(OwnLauncher, launch.launcher)
    if (
        launch.tpu
        or config.strategy == "xla"
        or (host.device == "tpu" and not config.cpu and config.strategy == "auto")
    ):
        return "xla"
    alone = shape.num_processes == 1 and shape.max_machines == 1
    return "torchrun" if _needs_agent(launch) or not alone else "single"


def _needs_agent(launch: LaunchConfig) -> bool:
    """Return whether a setting needs the elastic agent; a single process is otherwise started without it."""
    meeting = (launch.rdzv_conf, launch.rdzv_endpoint, launch.rdzv_id, launch.log_dir, launch.tee)
    plain = LaunchConfig()
    return (
        launch.max_restarts > 0
        or any(value is not None for value in meeting)
        or launch.rdzv_backend != plain.rdzv_backend
        or launch.role != plain.role
    )
