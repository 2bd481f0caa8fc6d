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
from hasten.launch.run import say
from hasten.launch.shape import split_range
from hasten.launch.torchrun import supervision
from hasten.optional import check_installed, need
from hasten.runtime import env as environment
from hasten.runtime.nodelist import ranks_in_words

VERSIONS: Final = ">=2.60,<3"
"""Versions of ray whose Train interface is used here."""

_SHARED: Final = (
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
_PASSED: Final = (
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


def plan(request: LaunchRequest, host: Host) -> LaunchPlan:
    """Return a plan with one command, which starts the program on workers of a Ray cluster.

    Raises: ConfigError for settings that Ray has no equivalent for.
    """
    launch, target = request.config.launch, request.target
    ray_settings = request.config.section(RaySettings)
    _check(request)
    low, high = _workers(launch.num_processes, ray_settings)
    resources = _resources(ray_settings.resources)
    use_gpu = not request.config.cpu and (
        resources.get("GPU", 0) > 0 or host.device in ("cuda", "rocm")
    )
    run = RayRun(
        workers=(low, high),
        use_gpu=use_gpu,
        resources=resources,
        max_failures=launch.max_restarts,
        address=ray_settings.address,
        storage=_storage(ray_settings.storage, request.folder),
        name=ray_settings.name,
        folder=request.folder,
        module=target.module,
    )
    env = {environment.CONFIG: request.handoff} if request.handoff else {}
    if launch.num_cpu_threads_per_process is not None:
        env["OMP_NUM_THREADS"] = str(launch.num_cpu_threads_per_process)
    argv = (
        host.python,
        "-m",
        "hasten.extensions.ray.launch_target",
        json.dumps(asdict(run)),
        target.name,
        *target.args,
    )
    return LaunchPlan(
        launcher="ray",
        procs=(Proc(argv, env),),
        notes=(_count_words(request, low, high, use_gpu),),
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
    name="ray", is_chosen=_is_chosen, plan=plan, survey=_check_ray_is_installed
)


def _count_words(request: LaunchRequest, low: int, high: int, use_gpu: bool) -> str:
    launch, workers = request.config.launch, request.config.section(RaySettings).workers
    count = f"{high} worker(s)" if low == high else f"{low} to {high} workers"
    why = (
        ""
        if workers or launch.num_processes
        else " (give num_processes or ray_workers for more)"
    )
    return f"{count} of Ray Train on {'GPUs' if use_gpu else 'the CPU'}{why}, {launch.max_restarts} restart(s)"


def _check(request: LaunchRequest) -> None:
    launch, plain = request.config.launch, LaunchConfig()
    without = [
        name
        for name in given(launch)
        if name not in _SHARED and getattr(launch, name) != getattr(plain, name)
    ]
    if without:
        raise ConfigError(
            f"--ray places and starts the workers itself, so that {', '.join(sorted(without))} would have no effect. Remove them, or "
            "start without --ray."
        )
    if launch.launcher != "auto":
        raise ConfigError(
            f"launcher={launch.launcher} contradicts --ray. Remove one of them."
        )
    workers = request.config.section(RaySettings).workers
    if workers is not None and launch.num_processes is not None:
        raise ConfigError(
            f"num_processes={launch.num_processes} and ray_workers={workers!r} both set the number of workers. Give one of them."
        )


def _workers(num_processes: int | None, ray_settings: RaySettings) -> tuple[int, int]:
    if ray_settings.workers is None:
        count = num_processes or 1
        return count, count
    try:
        return split_range(ray_settings.workers)
    except ConfigError as error:
        raise ConfigError(
            f"ray_workers={ray_settings.workers!r} is not a number of workers; write one number, or min:max such as 2:4."
        ) from error


def _storage(storage: str | None, folder: str) -> str | None:
    """Return the storage as Ray accepts it: a URL, or an absolute path."""
    return (
        storage if storage is None or "://" in storage else str(Path(folder, storage))
    )


def _resources(requested_amounts: Mapping[str, Any]) -> dict[str, float]:
    amounts: dict[str, float] = {}
    for name, value in requested_amounts.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError(
                f"ray_resources: {name}={value!r} is not an amount, so that Ray could not reserve it; write numbers, such as CPU=2,GPU=1."
            )
        amounts[name] = value
    return amounts


@dataclass(frozen=True, slots=True)
class LostOrFailed:
    """The end of one worker of a Ray run: an exception of its program, or the loss of its actor."""

    rank: int
    summary: str
    lost: bool = False
    host: str = ""
    pid: int = 0


def failures_of(error: BaseException) -> list[LostOrFailed]:
    """Return the failed workers of a `ray.train.WorkerGroupError`, by rank; empty for other errors."""
    worker_failures: Mapping[int, BaseException] = getattr(error, "worker_failures", {})
    return [_failed(rank, worker_failures[rank]) for rank in sorted(worker_failures)]


def _failed(rank: int, error: BaseException) -> LostOrFailed:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if not kinds & {
        "WorkerHealthCheckFailedError",
        "WorkerHealthCheckTimeoutError",
        "RayActorError",
    }:
        return LostOrFailed(rank, f"{type(error).__name__}: {error}")
    text = str(error)
    host, pid = (
        re.search(r"hostname='([^']*)'", text),
        re.search(r"pid[=:] ?(\d+)", text),
    )
    detail = re.search(r"The actor is dead because (.*)", text)
    words = (
        detail[1].partition(" Some common causes")[0].rstrip(". ")
        if detail
        else text.strip().splitlines()[0].rstrip(".")
    )
    return LostOrFailed(
        rank, words, True, host[1] if host else "", int(pid[1]) if pid else 0
    )


def lost_words(lost: Sequence[LostOrFailed]) -> str:
    """Return one message for lost ranks: which, on what machine, the reason that Ray gives, and what to do."""
    named = ranks_in_words([worker.rank for worker in lost])
    first = lost[0]
    where = (
        f" (Ray actor with pid {first.pid} on {first.host})"
        if len(lost) == 1 and first.host
        else ""
    )
    return (
        f"{named}{where} was lost: {first.summary}. The other ranks cannot finish a step without it. Look for the kernel's "
        "out-of-memory killer and for a reclaimed machine; with FailureConfig(max_failures=…) or --max_restarts Ray restarts the "
        "workers, and the run continues from its last checkpoint."
    )


def verdict(failures: Sequence[LostOrFailed]) -> str:
    """Return one message about the failure that ended the run: a lost rank, else the rank whose error is not an echo of another's."""
    lost = [one for one in failures if one.lost]
    if lost:
        return lost_words(lost)
    records = [
        failure.Failure(one.rank, one.host, 1, 0.0, summary=one.summary)
        for one in failures
    ]
    return failure.failure_words(failure.first_failure(records))


def main() -> None:
    """Run the program on the workers of a Ray cluster, as the JSON on the command line describes; exit with 1 if it failed."""
    run_fields = json.loads(sys.argv[1])
    run = RayRun(**{**run_fields, "workers": tuple(run_fields["workers"])})
    program = sys.argv[2:]
    ray, train = need("ray", VERSIONS, "--ray"), need("ray.train", VERSIONS, "--ray")
    ray.init(address=run.address)
    variables = environment.snapshot()
    passed = {name: variables[name] for name in _PASSED if variables.get(name)}
    trainer = need("ray.train.torch", VERSIONS, "--ray").TorchTrainer(
        run_program,
        train_loop_config={
            "program": program,
            "module": run.module,
            "folder": run.folder,
        },
        scaling_config=train.ScalingConfig(
            num_workers=run.workers[0]
            if run.workers[0] == run.workers[1]
            else run.workers,
            use_gpu=run.use_gpu,
            resources_per_worker=dict(run.resources) or None,
        ),
        run_config=train.RunConfig(
            name=run.name,
            storage_path=run.storage,
            failure_config=train.FailureConfig(max_failures=run.max_failures),
            callbacks=[_announcer(train)],
            worker_runtime_env={"env_vars": passed},
        ),
    )
    try:
        trainer.fit()
    except train.TrainingFailedError as error:
        failures = failures_of(error)
        words = verdict(failures) if failures else str(error)
        failure.leave(words)
        say(words)
        sys.exit(1)


# Any: the module ray.train and one of its callbacks; ray is optional
def _announcer(train: Any) -> Any:
    """Return a callback that prints the lost ranks of every failure, including those after which Ray restarts the workers."""

    class Announcer(train.UserCallback):  # type: ignore[misc]  # its base class is found when ray is imported
        def after_exception(
            self, run_context: Any, worker_exceptions: Mapping[int, BaseException]
        ) -> None:
            say(
                verdict(
                    [
                        _failed(rank, error)
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
