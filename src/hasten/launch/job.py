"""Preparation of a launch from its command line: settings, target, machine and plan, up to the start of processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, assert_never, cast

from hasten.config import handoff
from hasten.config.checks import refuse_absent
from hasten.config.files import effective_settings
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
    describe_host,
)
from hasten.launch.cluster import slurm
from hasten.launch.run import complete_plan, execute_plan
from hasten.launch.shape import decide_shape
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

    def describe_mesh(self) -> str:
        """Return the mesh as a table, with bytes per rank; empty for pure data parallelism or an unknown world size.

        Raises: ConfigError for axis sizes that do not match the number of processes.
        """
        meeting = self.plan.meeting
        num_processes = sum(proc.count for proc in self.plan.procs)
        if meeting is None or meeting.min_machines != meeting.max_machines:
            return ""
        mesh_spec = mesh_of(
            self.request.config, num_processes, num_processes * meeting.max_machines
        )
        if (
            mesh_spec.size(Axis.DP_REPLICATE) == mesh_spec.world_size
            and mesh_spec.ep == 1
        ):
            return ""
        table_title = f"mesh: {mesh_title(mesh_spec)} = {mesh_spec.world_size} process{'' if mesh_spec.world_size == 1 else 'es'}"
        table_lines = [
            table_title,
            *("    " + row for row in mesh_table(mesh_spec, num_processes)),
        ]
        return "\n".join([*table_lines, ""])

    def run(self) -> int:
        """Run the job to completion and return its exit code."""
        if self.launch_target is not None:
            run_target = self.launch_target.run
        else:
            run_target = None
        return (run_target or execute_plan)(self.plan, self.request.config, self.host)


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
    host = host or describe_host()
    variables = dict(host.env)
    variables.pop(handoff.VARIABLE, None)
    resolved = effective_settings(variables, config_file, settings)
    refuse_absent(resolved.entries)
    launch_settings = resolved.config.launch
    if not words:
        raise ConfigError(
            "no script was given, so there is nothing to start: `launch [settings] script.py`. See `launch --help`."
        )
    program = Target(
        words[0],
        tuple(words[1:]),
        module=launch_settings.module,
        no_python=launch_settings.no_python,
    )
    request = LaunchRequest(
        resolved.config,
        program,
        handoff.pack_settings(resolved.entries),
        flags=_absolute_flags(typed),
        folder=str(Path.cwd()),
        entries=resolved.entries,
    )
    launch_target = choose_target(request)
    if launch_target is None or not launch_target.runs_in_image:
        if not launch_settings.no_python:
            _check_engine(resolved.config)
        _check_script(program)
    for surveying_target in (
        _machine_targets() if launch_target is None else [launch_target]
    ):
        if surveying_target.survey is not None:
            host = surveying_target.survey(request, host)
    if launch_target is None:
        launch_plan = make_plan(request, host)
    else:
        launch_plan = launch_target.plan(request, host)
    return Job(
        request, resolved, host, complete_plan(launch_plan, host.env), launch_target
    )


def _check_engine(config: Config) -> None:
    engine_package = package_of(config.strategy)
    try:
        if engine_package is not None:
            check_installed(engine_package, why=f"strategy={config.strategy!r}")
    except MissingPackageError as error:
        raise ConfigError(str(error)) from error


def _check_script(target: Target) -> None:
    if target.module or target.no_python:
        return
    script_path = Path(target.name)
    if script_path.is_dir() and not (script_path / "__main__.py").is_file():
        raise ConfigError(
            f"{target.name!r} is a folder without a __main__.py, so it cannot be run; give a script, such as "
            f"{script_path / 'train.py'}."
        )
    if script_path.exists():
        return
    script_folder = Path(target.name).parent
    if script_folder.is_dir():
        script_names = list(map(str, script_folder.glob("*.py")))
    else:
        script_names = []
    similar_names = get_close_matches(target.name, script_names, n=1)
    if similar_names:
        hint = f"did you mean {similar_names[0]}?"
    else:
        hint = f"the current folder is {Path.cwd()}."
    raise ConfigError(
        f"the script {target.name!r} does not exist; {hint} (For a module give -m, for a program --no_python.)"
    )


def _absolute_flags(flags: Sequence[str]) -> tuple[str, ...]:
    """Return the flags with an absolute path of the settings file, because a batch job starts in another folder."""
    absolute_flags = list(flags)
    for index, flag_word in enumerate(absolute_flags):
        flag_name, equals, flag_value = flag_word.partition("=")
        if flag_name in ("--config_file", "--config-file"):
            if equals:
                absolute_flags[index] = f"{flag_name}={Path(flag_value).absolute()}"
            elif index + 1 < len(absolute_flags):
                absolute_flags[index + 1] = str(
                    Path(absolute_flags[index + 1]).absolute()
                )
    return tuple(absolute_flags)


def make_plan(request: LaunchRequest, host: Host) -> LaunchPlan:
    """Return the plan for `request` on `host`.

    Raises: ConfigError for settings that contradict each other or this machine.
    """
    launch_target = choose_target(request)
    if launch_target is not None:
        return launch_target.plan(request, host)
    job_shape = decide_shape(request, host)
    launcher_name = _own_launcher(request, job_shape)
    if launcher_name != "task":
        for machine_target in _machine_targets():
            assert machine_target.plan_machine is not None, "it is one of these targets"
            machine_plan = machine_target.plan_machine(request, host, job_shape)
            if machine_plan is not None:
                return machine_plan
    match launcher_name:
        case "single":
            return torchrun.plan_single(request, host, job_shape)
        case "torchrun":
            return torchrun.plan(request, host, job_shape)
        case "task":
            return slurm.plan_task(request, host, job_shape)
        case other:
            assert_never(other)


def _machine_targets() -> list[LaunchTarget]:
    """Return the targets that may plan the processes of this machine."""
    return [target for target in all_targets() if target.plan_machine is not None]


def _own_launcher(request: LaunchRequest, shape: JobShape) -> OwnLauncher:
    launch_settings = request.config.launch
    if launch_settings.launcher == "slurm" and shape.allocation.rank is None:
        if not shape.allocation.source:
            raise ConfigError(
                "launcher=slurm reads its ranks from SLURM, but srun did not start this command. "
                "Start it with srun, or write a batch script with --submit slurm."
            )
        return "torchrun"
    if launch_settings.launcher == "single" and (
        shape.num_processes > 1 or shape.max_machines > 1
    ):
        raise ConfigError(
            f"launcher=single starts one process, but {shape.num_processes} on {shape.max_machines} machine(s) were requested. "
            f"Remove launcher, or set num_processes to 1."
        )
    if shape.allocation.rank is not None:
        return "task"
    if launch_settings.launcher in ("single", "torchrun"):
        return cast(OwnLauncher, launch_settings.launcher)
    is_single_process = shape.num_processes == 1 and shape.max_machines == 1
    if _needs_agent(launch_settings) or not is_single_process:
        return "torchrun"
    return "single"


def _needs_agent(launch_settings: LaunchConfig) -> bool:
    """Return whether a setting needs the elastic agent; a single process is otherwise started without it."""
    meeting_settings = (
        launch_settings.rdzv_conf,
        launch_settings.rdzv_endpoint,
        launch_settings.rdzv_id,
        launch_settings.log_dir,
        launch_settings.tee,
    )
    defaults = LaunchConfig()
    return (
        launch_settings.max_restarts > 0
        or any(value is not None for value in meeting_settings)
        or launch_settings.rdzv_backend != defaults.rdzv_backend
        or launch_settings.role != defaults.role
    )
