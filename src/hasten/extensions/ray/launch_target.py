"""Launch plans for Ray Train, the program that runs them, and the ranks that a failed Ray run has lost.

`python -m hasten.extensions.ray.launch_target JSON program args…` connects to the cluster and runs the program on its workers.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from hasten.config.base import given
from hasten.config.sections.launch import LaunchConfig
from hasten.errors import ConfigError, LaunchError, MissingPackageError
from hasten.extensions.ray.settings import RaySettings
from hasten.launch import failure
from hasten.launch.base import (
    Host,
    JobShape,
    LaunchPlan,
    LaunchRequest,
    LaunchTarget,
    Proc,
)
from hasten.launch.run import print_message
from hasten.launch.shape import split_range
from hasten.launch.torchrun import supervision
from hasten.optional import check_installed, need
from hasten.runtime import env as environment
from hasten.runtime.nodelist import ranks_in_words

VERSIONS: Final = ">=2.60,<3"
"""Versions of ray whose Train interface is used here."""

_SUPPORTED_SETTINGS: Final = (
    "ray",
    *(
        "num_processes",
        "max_restarts",
        "module",
        "quiet",
        "multi_gpu",
        "num_cpu_threads_per_process",
    ),
    *("stop_grace_s", "monitor_interval", "check_in", "launcher"),
)
"""Other settings of a launch that have a meaning, or do no harm, on Ray."""
_PASSED_VARIABLES: Final = (
    environment.CONFIG,
    "OMP_NUM_THREADS",
    environment.LOG_LEVEL,
    environment.DEBUG,
)
"""Variables that the workers receive from this process, whatever machine they are on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayRun:
    """A run of Ray Train: its workers with their resources, its storage, and the program with its folder."""

    workers: tuple[int, int]
    """Smallest and largest number of workers; the run is elastic if they differ."""
    use_gpu: bool = False
    resources: Mapping[str, float] = field(default_factory=dict)
    max_failures: int = 0
    address: str | None = None
    storage: str | None = None
    name: str | None = None
    folder: str = "."
    module: bool = False


def _is_chosen(request: LaunchRequest) -> bool:
    ray_settings = request.config.section(RaySettings)
    names = sorted(given(ray_settings) - {"enabled"})
    if names and not ray_settings.enabled:
        raise ConfigError(
            f"{', '.join(f'ray_{name}' for name in names)} would have no effect without ray. Add --ray, or remove them."
        )
    return ray_settings.enabled


def make_plan(request: LaunchRequest, host: Host) -> LaunchPlan:
    """Return a plan with one command, which starts the program on workers of a Ray cluster.

    Raises: ConfigError for settings that Ray has no equivalent for.
    """
    launch_settings = request.config.launch
    target = request.target
    ray_settings = request.config.section(RaySettings)
    _check_settings(request)
    min_workers, max_workers = _worker_range(
        launch_settings.num_processes, ray_settings
    )
    worker_resources = _worker_resources(ray_settings.resources)
    use_gpu = not request.config.cpu and (
        worker_resources.get("GPU", 0) > 0 or host.device in ("cuda", "rocm")
    )
    ray_run = RayRun(
        workers=(min_workers, max_workers),
        use_gpu=use_gpu,
        resources=worker_resources,
        max_failures=launch_settings.max_restarts,
        address=ray_settings.address,
        storage=_storage_path(ray_settings.storage, request.folder),
        name=ray_settings.name,
        folder=request.folder,
        module=target.module,
    )
    driver_variables = {environment.CONFIG: request.handoff} if request.handoff else {}
    if launch_settings.num_cpu_threads_per_process is not None:
        driver_variables["OMP_NUM_THREADS"] = str(
            launch_settings.num_cpu_threads_per_process
        )
    driver_command = (
        host.python,
        "-m",
        "hasten.extensions.ray.launch_target",
        json.dumps(asdict(ray_run)),
        target.name,
        *target.args,
    )
    return LaunchPlan(
        launcher="ray",
        procs=(Proc(driver_command, driver_variables),),
        notes=(_count_words(request, min_workers, max_workers, use_gpu),),
        supervision=supervision(request, JobShape(num_processes=1)),
        target=target,
    )


def _check_ray_is_installed(request: LaunchRequest, host: Host) -> Host:
    try:
        check_installed("ray", VERSIONS, why="--ray")
    except MissingPackageError as error:
        raise ConfigError(str(error)) from error
    return host


TARGET: Final = LaunchTarget(
    name="ray", is_chosen=_is_chosen, plan=make_plan, survey=_check_ray_is_installed
)


def _count_words(
    request: LaunchRequest, min_workers: int, max_workers: int, use_gpu: bool
) -> str:
    launch_settings = request.config.launch
    workers = request.config.section(RaySettings).workers
    if min_workers == max_workers:
        workers_text = f"{max_workers} worker(s)"
    else:
        workers_text = f"{min_workers} to {max_workers} workers"
    if workers or launch_settings.num_processes:
        remedy_text = ""
    else:
        remedy_text = " (give num_processes or ray_workers for more)"
    return f"{workers_text} of Ray Train on {'GPUs' if use_gpu else 'the CPU'}{remedy_text}, {launch_settings.max_restarts} restart(s)"


def _check_settings(request: LaunchRequest) -> None:
    launch_settings = request.config.launch
    defaults = LaunchConfig()
    unsupported_names = []
    for name in given(launch_settings):
        is_changed = getattr(launch_settings, name) != getattr(defaults, name)
        if is_changed and name not in _SUPPORTED_SETTINGS:
            unsupported_names.append(name)
    if unsupported_names:
        raise ConfigError(
            f"--ray places and starts the workers itself, so that {', '.join(sorted(unsupported_names))} would have no effect. Remove them, or "
            "start without --ray."
        )
    if launch_settings.launcher != "auto":
        raise ConfigError(
            f"launcher={launch_settings.launcher} contradicts --ray. Remove one of them."
        )
    workers = request.config.section(RaySettings).workers
    if workers is not None and launch_settings.num_processes is not None:
        raise ConfigError(
            f"num_processes={launch_settings.num_processes} and ray_workers={workers!r} both set the number of workers. Give one of them."
        )


def _worker_range(
    num_processes: int | None, ray_settings: RaySettings
) -> tuple[int, int]:
    if ray_settings.workers is None:
        count = num_processes or 1
        return count, count
    try:
        return split_range(ray_settings.workers)
    except ConfigError as error:
        raise ConfigError(
            f"ray_workers={ray_settings.workers!r} is not a number of workers; write one number, or min:max such as 2:4."
        ) from error


def _storage_path(storage: str | None, folder: str) -> str | None:
    """Return the storage as Ray accepts it: a URL, or an absolute path."""
    if storage is None or "://" in storage:
        return storage
    return str(Path(folder, storage))


def _worker_resources(requested_amounts: Mapping[str, Any]) -> dict[str, float]:
    amounts: dict[str, float] = {}
    for resource_name, resource_amount in requested_amounts.items():
        if (
            isinstance(resource_amount, bool)
            or not isinstance(resource_amount, int | float)
            or resource_amount < 0
        ):
            raise ConfigError(
                f"ray_resources: {resource_name}={resource_amount!r} is not an amount, so that Ray could not reserve it; write numbers, such as CPU=2,GPU=1."
            )
        amounts[resource_name] = resource_amount
    return amounts


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """The end of one worker of a Ray run: an exception of its program, or the loss of its actor."""

    rank: int
    summary: str
    lost: bool = False
    host: str = ""
    pid: int = 0


def failures_of(error: BaseException) -> list[WorkerEnd]:
    """Return the failed workers of a `ray.train.WorkerGroupError`, by rank; empty for other errors."""
    worker_failures: Mapping[int, BaseException] = getattr(error, "worker_failures", {})
    return [
        _worker_end(rank, worker_failures[rank]) for rank in sorted(worker_failures)
    ]


def _worker_end(rank: int, error: BaseException) -> WorkerEnd:
    class_names = {kind.__name__ for kind in type(error).__mro__}
    if not class_names & {
        "WorkerHealthCheckFailedError",
        "WorkerHealthCheckTimeoutError",
        "RayActorError",
    }:
        return WorkerEnd(rank, f"{type(error).__name__}: {error}")
    error_text = str(error)
    host_match = re.search(r"hostname='([^']*)'", error_text)
    pid_match = re.search(r"pid[=:] ?(\d+)", error_text)
    reason_match = re.search(r"The actor is dead because (.*)", error_text)
    if reason_match:
        reason_text = reason_match[1].partition(" Some common causes")[0].rstrip(". ")
    else:
        reason_text = error_text.strip().splitlines()[0].rstrip(".")
    return WorkerEnd(
        rank,
        reason_text,
        True,
        host_match[1] if host_match else "",
        int(pid_match[1]) if pid_match else 0,
    )


def lost_words(lost_workers: Sequence[WorkerEnd]) -> str:
    """Return one message for lost ranks: which, on what machine, the reason that Ray gives, and what to do."""
    ranks_text = ranks_in_words([worker.rank for worker in lost_workers])
    first_worker = lost_workers[0]
    worker_text = ""
    if len(lost_workers) == 1 and first_worker.host:
        worker_text = f" (Ray actor with pid {first_worker.pid} on {first_worker.host})"
    return (
        f"{ranks_text}{worker_text} was lost: {first_worker.summary}. The other ranks cannot finish a step without it. Look for the kernel's "
        "out-of-memory killer and for a reclaimed machine; with FailureConfig(max_failures=…) or --max_restarts Ray restarts the "
        "workers, and the run continues from its last checkpoint."
    )


def verdict_words(failures: Sequence[WorkerEnd]) -> str:
    """Return one message about the failure that ended the run: a lost rank, else the rank whose error is not an echo of another's."""
    lost_workers = [failure_end for failure_end in failures if failure_end.lost]
    if lost_workers:
        return lost_words(lost_workers)
    records = []
    for failure_end in failures:
        records.append(
            failure.Failure(
                failure_end.rank,
                failure_end.host,
                1,
                0.0,
                summary=failure_end.summary,
            )
        )
    return failure.failure_words(failure.first_failure(records))


def main() -> None:
    """Run the program on the workers of a Ray cluster, as the JSON on the command line describes; exit with 1 if it failed."""
    run_fields = json.loads(sys.argv[1])
    ray_run = RayRun(**{**run_fields, "workers": tuple(run_fields["workers"])})
    program = sys.argv[2:]
    ray = need("ray", VERSIONS, "--ray")
    train = need("ray.train", VERSIONS, "--ray")
    ray.init(address=ray_run.address)
    variables = environment.snapshot()
    passed_variables = {}
    for variable_name in _PASSED_VARIABLES:
        if variables.get(variable_name):
            passed_variables[variable_name] = variables[variable_name]
    is_fixed = ray_run.workers[0] == ray_run.workers[1]
    num_workers = ray_run.workers[0] if is_fixed else ray_run.workers
    trainer = need("ray.train.torch", VERSIONS, "--ray").TorchTrainer(
        run_program,
        train_loop_config={
            "program": program,
            "module": ray_run.module,
            "folder": ray_run.folder,
        },
        scaling_config=train.ScalingConfig(
            num_workers=num_workers,
            use_gpu=ray_run.use_gpu,
            resources_per_worker=dict(ray_run.resources) or None,
        ),
        run_config=train.RunConfig(
            name=ray_run.name,
            storage_path=ray_run.storage,
            failure_config=train.FailureConfig(max_failures=ray_run.max_failures),
            callbacks=[_failure_callback(train)],
            worker_runtime_env={"env_vars": passed_variables},
        ),
    )
    try:
        trainer.fit()
    except train.TrainingFailedError as error:
        failures = failures_of(error)
        verdict_text = verdict_words(failures) if failures else str(error)
        failure.write_verdict(verdict_text)
        print_message(verdict_text)
        sys.exit(1)


# Any: the module ray.train and one of its callbacks; ray is optional
def _failure_callback(train: Any) -> Any:
    """Return a callback that prints the lost ranks of every failure, including those after which Ray restarts the workers."""

    class Announcer(train.UserCallback):  # type: ignore[misc]  # its base class is found when ray is imported
        def after_exception(
            self, run_context: Any, worker_exceptions: Mapping[int, BaseException]
        ) -> None:
            print_message(
                verdict_words(
                    [
                        _worker_end(rank, error)
                        for rank, error in sorted(worker_exceptions.items())
                    ]
                )
            )

    return Announcer()


def run_program(config: Mapping[str, Any]) -> None:
    """Run the user's program as a rank: the training loop of a Ray Train worker.

    Raises: LaunchError for a program that ends with an exit code; every exception of the program.
    """
    name, *args = config["program"]
    if Path(
        config["folder"]
        # missing on a machine that does not share it: the program is then found by its path
    ).is_dir():
        os.chdir(config["folder"])
    sys.argv[:] = [name, *args]
    sys.path.insert(
        0, str(Path.cwd()) if config["module"] else str(Path(name).resolve().parent)
    )
    try:
        if config["module"]:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise LaunchError(
                f"the program ended with exit code {end.code!r}, which Ray would take for success, so the run is ended as failed. Read its reason in the output "
                "of this worker, and let the program return, or exit with 0, after its last step."
            ) from end


if __name__ == "__main__":
    # Run the module under its real name, so that workers import the training loop by it.
    from hasten.extensions.ray import launch_target as this

    this.main()
