"""Preparation of a launch from its command line: settings, target, machine and plan, up to the start of processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, assert_never, cast

from hasten.config import absent, handoff
from hasten.config.files import effective
from hasten.config.resolve import Resolved
from hasten.config.root import Config
from hasten.config.sections.launch import LaunchConfig
from hasten.config.source import SettingEntry
from hasten.errors import ConfigError, MissingPackageError
from hasten.extension import package_of
from hasten.launch import torchrun
from hasten.launch.base import (
    Host,
    JobShape,
    LaunchPlan,
    LaunchRequest,
    LaunchTarget,
    Target,
    look,
)
from hasten.launch.cluster import slurm
from hasten.launch.run import complete, execute
from hasten.launch.shape import decide
from hasten.launch.targets import all_targets, choose_target
from hasten.optional import check_installed
from hasten.runtime.mesh_plan import Axis, mesh_of, mesh_table, mesh_title

OwnLauncher = Literal["single", "torchrun", "task"]


@dataclass(frozen=True, slots=True)
class Job:
    """A prepared launch: request, resolved settings, host and plan."""

    request: LaunchRequest
    resolved: Resolved
    host: Host
    plan: LaunchPlan
    launch_target: LaunchTarget | None = None
    """None if hasten starts the processes of this machine itself."""

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
        title = f"mesh: {mesh_title(spec)} = {spec.world_size} process{'' if spec.world_size == 1 else 'es'}"
        table = [title, *("    " + row for row in mesh_table(spec, count))]
        return "\n".join([*table, ""])

    def run(self) -> int:
        """Run the job to completion and return its exit code."""
        run = self.launch_target.run if self.launch_target is not None else None
        return (run or execute)(self.plan, self.request.config, self.host)


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
    launch = resolved.config.launch
    if not words:
        raise ConfigError(
            "no script was given, so there is nothing to start: `launch [settings] script.py`. See `launch --help`."
        )
    target = Target(
        words[0], tuple(words[1:]), module=launch.module, no_python=launch.no_python
    )
    request = LaunchRequest(
        resolved.config,
        target,
        handoff.pack(resolved.entries),
        flags=_absolute(typed),
        folder=str(Path.cwd()),
        entries=resolved.entries,
    )
    launch_target = choose_target(request)
    if launch_target is None or not launch_target.runs_in_image:
        if not launch.no_python:
            _check_engine(resolved.config)
        _check_script(target)
    for surveying_target in (
        _machine_targets() if launch_target is None else [launch_target]
    ):
        if surveying_target.survey is not None:
            host = surveying_target.survey(request, host)
    plan = (
        make_plan(request, host)
        if launch_target is None
        else launch_target.plan(request, host)
    )
    return Job(request, resolved, host, complete(plan, host.env), launch_target)


def _check_engine(config: Config) -> None:
    package = package_of(config.strategy)
    try:
        if package is not None:
            check_installed(package, why=f"strategy={config.strategy!r}")
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
    names = (
        [str(folder / p.name) for p in folder.glob("*.py")] if folder.is_dir() else []
    )
    similar_names = get_close_matches(target.name, names, n=1)
    hint = (
        f"did you mean {similar_names[0]}?"
        if similar_names
        else f"the current folder is {Path.cwd()}."
    )
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


def make_plan(request: LaunchRequest, host: Host) -> LaunchPlan:
    """Return the plan for `request` on `host`.

    Raises: ConfigError for settings that contradict each other or this machine.
    """
    target = choose_target(request)
    if target is not None:
        return target.plan(request, host)
    shape = decide(request, host)
    name = _launcher(request, shape)
    if name != "task":
        for machine_target in _machine_targets():
            assert machine_target.plan_machine is not None, "it is one of these targets"
            plan = machine_target.plan_machine(request, host, shape)
            if plan is not None:
                return plan
    match name:
        case "single":
            return torchrun.plan_single(request, host, shape)
        case "torchrun":
            return torchrun.plan(request, host, shape)
        case "task":
            return slurm.plan_task(request, host, shape)
        case other:
            assert_never(other)


def _machine_targets() -> list[LaunchTarget]:
    """Return the targets that may plan the processes of this machine."""
    return [target for target in all_targets() if target.plan_machine is not None]


def _launcher(request: LaunchRequest, shape: JobShape) -> OwnLauncher:
    launch = request.config.launch
    if launch.launcher == "slurm" and shape.allocation.rank is None:
        if not shape.allocation.source:
            raise ConfigError(
                "launcher=slurm reads its ranks from SLURM, but srun did not start this command. "
                "Start it with srun, or write a batch script with --submit slurm."
            )
        return "torchrun"
    if launch.launcher == "single" and (
        shape.num_processes > 1 or shape.max_machines > 1
    ):
        raise ConfigError(
            f"launcher=single starts one process, but {shape.num_processes} on {shape.max_machines} machine(s) were requested. "
            f"Remove launcher, or set num_processes to 1."
        )
    if shape.allocation.rank is not None:
        return "task"
    if launch.launcher in ("single", "torchrun"):
        return cast(OwnLauncher, launch.launcher)
    is_single_process = shape.num_processes == 1 and shape.max_machines == 1
    return "torchrun" if _needs_agent(launch) or not is_single_process else "single"


def _needs_agent(launch: LaunchConfig) -> bool:
    """Return whether a setting needs the elastic agent; a single process is otherwise started without it."""
    meeting = (
        launch.rdzv_conf,
        launch.rdzv_endpoint,
        launch.rdzv_id,
        launch.log_dir,
        launch.tee,
    )
    plain = LaunchConfig()
    return (
        launch.max_restarts > 0
        or any(value is not None for value in meeting)
        or launch.rdzv_backend != plain.rdzv_backend
        or launch.role != plain.role
    )
