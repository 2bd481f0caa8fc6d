"""Execution of a launch plan: the only part of launching that starts processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Final

from hasten.config.root import Config
from hasten.errors import ConfigError, LaunchError
from hasten.launch import failure as verdict
from hasten.launch import network
from hasten.launch.base import Host, LaunchPlan, PlannedFile, Proc
from hasten.launch.checkin import Report, make_report
from hasten.launch.failure import (
    end_after_signal,
    end_words,
    read_failure,
    render_failure,
)
from hasten.launch.guard import SAVING, STOPPING, Interrupted, SignalGuard, kill_groups
from hasten.launch.worker import LAUNCHER_PID, die_with
from hasten.runtime import env as environment
from hasten.runtime.launcher_files import ERROR_FILE

_MEMORY: Final = Path("/dev/shm")  # in-memory file system on Linux
_LOCK: Final = "launcher"


@contextmanager
def memory_folder(memory: Path = _MEMORY) -> Iterator[Path | None]:
    """A private folder in shared memory; None if the system has no in-memory file system.

    The launcher locks a file in it. Folders of killed launchers are not locked, and are removed first.
    """
    if not memory.is_dir() or not os.access(memory, os.W_OK):
        yield None
        return
    prefix = f"hasten-{os.geteuid()}-"
    for stale_folder in memory.glob(f"{prefix}*"):
        _remove_if_stale(stale_folder)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=memory))  # mode 0700
    descriptor = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_if_stale(folder: Path) -> None:
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # just being created, or owned by another user
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:  # its launcher is running
        return
    finally:
        os.close(descriptor)


PARENT_PID: Final = "HASTEN_PARENT_PID"
"""Process id of the program that started the launcher, such as a notebook; the launcher exits with that program."""

_STOP_GRACE_S: Final = 15.0


def print_message(text: str) -> None:
    """Print a message to stderr, so that it does not mix with the program's output."""
    sys.stdout.flush()
    sys.stderr.write(f"[hasten] {text}\n")
    sys.stderr.flush()


def complete_plan(plan: LaunchPlan, env: Mapping[str, str]) -> LaunchPlan:
    """Return the plan with GLOO_SOCKET_IFNAME set to the network interface that reaches the other machines."""
    if plan.meeting is None or "GLOO_SOCKET_IFNAME" in env:
        return plan
    if plan.meeting.alone:
        local_address = "127.0.0.1"
    else:
        local_address = network.address_towards(plan.meeting.address)
    if plan.meeting.alone or not local_address.startswith("127."):
        interface_name = network.interface_of(local_address)
    else:
        interface_name = None
    if interface_name is None:
        return plan
    procs = tuple(
        replace(proc, env={**proc.env, "GLOO_SOCKET_IFNAME": interface_name})
        for proc in plan.procs
    )
    note = f"GLOO_SOCKET_IFNAME={interface_name}: the interface of {local_address}"
    return replace(plan, procs=procs, notes=(*plan.notes, note))


def execute_plan(plan: LaunchPlan, config: Config, host: Host) -> int:
    """Run the plan to completion and return the exit code of the job.

    Raises: LaunchError if something could not be started.
    """
    if parent_pid := host.env.get(PARENT_PID):
        die_with(int(parent_pid))
    _check_submitter(plan, host)
    for planned_file in plan.files:
        _write_planned(planned_file)
    match plan.launcher:
        case "torchrun":
            return _run_agent(plan, config, host)
        case "single":
            return _run_watched(plan.procs[0], config.launch.stop_grace_s)
        case "task":
            return _exec_rank(plan.procs[0])
        case _ if plan.submitter is not None:
            return _submit_job(plan, config)
        case _:
            return _run_foreign(plan.procs[0], config.launch.stop_grace_s)


def _check_submitter(plan: LaunchPlan, host: Host) -> None:
    """Raise if the command that submits the job is missing; nothing has been written yet."""
    submitter = plan.submitter
    if submitter is not None and plan.procs and submitter.program not in host.programs:
        raise LaunchError(
            f"{submitter.program} was not found on PATH, so the job cannot be submitted, and nothing was written. Run the command where "
            f"{submitter.program} is installed, or {submitter.remedy}."
        )


def _submit_job(plan: LaunchPlan, config: Config) -> int:
    """Submit what was written, if that was asked for; say what was done and what is left to do."""
    print_message(f"wrote {plan.files[0].path}")
    for note in plan.notes if not config.launch.quiet else ():
        print_message(f"note: {note}")
    if not plan.procs:
        return 0
    return _run_foreign(plan.procs[0], config.launch.stop_grace_s)


def _write_planned(planned: PlannedFile) -> None:
    path = Path(planned.path)
    try:
        path.write_text(planned.text)
        if planned.executable:
            path.chmod(0o755)
    except OSError as error:
        raise LaunchError(
            f"the file {path.absolute()} cannot be written ({error.strerror}), and without it the job cannot be submitted. Start the "
            f"command in a folder that you may write to."
        ) from error


def _make_log_dir(folder: str) -> None:
    """Create `folder` and check that log files can be written to it.

    Raises: ConfigError otherwise.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"log_dir={folder!r} cannot be written to ({reason}), so the output of the processes would be lost. Give --log_dir a "
            f"folder that you may write to, or remove it to print to the terminal."
        ) from error


def _run_agent(plan: LaunchPlan, config: Config, host: Host) -> int:
    assert plan.meeting is not None, "a torchrun plan has a meeting"
    if plan.supervision.log_dir is not None:
        _make_log_dir(plan.supervision.log_dir)
    report = make_report(plan, config, host, is_alone=plan.meeting.alone)
    (proc,) = plan.procs
    worker_variables = dict(proc.env)
    with environment.restored_environment(), memory_folder() as memory_path:
        if memory_path is not None:
            worker_variables[environment.MEMORY_FOLDER] = str(memory_path)
        outer_environment = environment.snapshot()
        # Torch reads its log level when imported; without this, the launcher's store warns about every unnamed client.
        environment.replace_environment(
            {
                "TORCH_CPP_LOG_LEVEL": "WARNING" if config.debug else "ERROR",
                **outer_environment,
            }
        )
        # imports torch, which planning does not need
        agent_module = import_module("hasten.launch.elastic.agent")
        signal_variables = {
            "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(
                number.name for number in (*STOPPING, signal.SIGQUIT)
            )
        }
        environment.replace_environment(
            {
                **signal_variables,
                **outer_environment,
                **worker_variables,
                LAUNCHER_PID: str(os.getpid()),
            }
        )
        run_agent: Callable[[LaunchPlan, Report, Callable[[str], None]], int] = (
            agent_module.run_agent
        )
        return run_agent(plan, report, print_message)


def _run_watched(proc: Proc, stop_grace_s: float) -> int:
    """Run one hasten worker and report its failure."""
    with tempfile.TemporaryDirectory(prefix="hasten-launch-") as scratch:
        error_file = str(Path(scratch) / "error.json")
        worker_environment = {
            **environment.snapshot(),
            **proc.env,
            ERROR_FILE: error_file,
            LAUNCHER_PID: str(os.getpid()),
        }
        exit_code, pid, stopped_by = _run_and_wait(
            proc.argv, worker_environment, stop_grace_s
        )
        if stopped_by is not None:
            exit_code, end_text = end_after_signal(stopped_by, [exit_code])
            print_message(
                f"{signal.Signals(stopped_by).name}: all processes of this machine {end_text}"
            )
            return exit_code
        if exit_code == 0:
            return 0
        failure = read_failure(
            0,
            socket.gethostname(),
            exit_code,
            pid,
            error_file=error_file,
            time=time.time(),
        )
        failure = replace(failure, stopped=False)
        verdict.write_verdict(verdict.failure_words(failure))
        if failure.traceback or exit_code < 0:
            print_message(render_failure([failure], python=sys.executable))
        return failure.exit_code


def _run_foreign(proc: Proc, stop_grace_s: float) -> int:
    """Run another launcher's command, which reports the failures of its processes itself."""
    exit_code, _, stopped_by = _run_and_wait(
        proc.argv, {**environment.snapshot(), **proc.env}, stop_grace_s
    )
    if stopped_by is not None:
        return 128 + stopped_by
    if exit_code != 0:
        print_message(f"{proc.argv[0]} ended with {end_words(exit_code)}")
    return 128 - exit_code if exit_code < 0 else exit_code


def _run_and_wait(
    argv: tuple[str, ...], env: Mapping[str, str], stop_grace_s: float
) -> tuple[int, int, int | None]:
    """Run a command, forwarding signals, and kill its group on failure; return exit code, pid and the stop signal."""
    try:
        child = subprocess.Popen(argv, env=env, start_new_session=True)
    except OSError as error:
        raise LaunchError(
            f"{argv[0]} cannot be started: {error.strerror}. Check that it is installed and on PATH."
        ) from error
    stopped_by: int | None = None
    guard = SignalGuard(
        lambda: [child.pid],
        grace_s=_STOP_GRACE_S,
        saving_grace_s=stop_grace_s,
        last_words=print_message,
    )
    try:
        with guard:
            while True:
                try:
                    return child.wait(), child.pid, stopped_by
                except Interrupted as stop:
                    if stopped_by is None:
                        stopped_by = stop.number
                        if stopped_by in SAVING:
                            guard.hold_signals()
                        with suppress(ProcessLookupError):  # it has just ended
                            os.killpg(child.pid, stopped_by)
    finally:
        if stopped_by is not None or child.poll() != 0:
            kill_groups([child.pid])


def _exec_rank(proc: Proc) -> int:
    """Replace this process with the rank, so that the cluster's launcher monitors the rank itself."""
    os.execve(proc.argv[0], list(proc.argv), {**environment.snapshot(), **proc.env})
