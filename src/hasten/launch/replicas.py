"""Launch of replicas that may be lost: one process each, a lighthouse for all, and a new process for each lost one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final

from hasten.config.root import Config
from hasten.config.source import SettingEntry, SettingSource
from hasten.errors import ConfigError, LaunchError, MissingPackageError
from hasten.launch.base import Host, LaunchPlan, Proc
from hasten.launch.failure import PREEMPTED, Failure, end_words, read_failure, render_failure
from hasten.launch.guard import STOPPING, kill_groups
from hasten.launch.network import interface_of
from hasten.launch.worker import LAUNCHER_PID
from hasten.optional import check_installed
from hasten.runtime import env as environment
from hasten.runtime import secret
from hasten.runtime.launcher_files import ERROR_FILE

_LOCAL: Final = "127.0.0.1"
_POLL_S: Final = 0.05
_QUICK_S: Final = 60.0
_QUICK_FAILURES: Final = 3
"""Errors of a replica's own program, one after the other and each soon after its start, after which it is not started again."""
_FINISHED: Final = "finished"
_JOINED: Final = "joined-"
ONE_PROCESS: Final = (
    SettingEntry(("launch", "num_processes"), 1, SettingSource("code", "--replicas")),
    SettingEntry(("launch", "launcher"), "single", SettingSource("code", "--replicas")),
)
"""Settings of the launch of one replica."""


def check(config: Config) -> None:
    """Raise ConfigError unless the settings describe replicas of one process each on this machine."""
    launch, replicas = config.launch, config.survive.replicas
    if launch.num_machines > 1 or launch.nnodes is not None:
        raise ConfigError(
            f"--replicas {replicas} starts all replicas on this machine, and num_machines={launch.num_machines} asks for several. Start a lighthouse of "
            "torchft, and on each machine `hasten launch` with --survive_lighthouse, --survive_replica and --replicas."
        )
    if launch.submit is not None or launch.launcher not in ("auto", "single"):
        raise ConfigError(
            f"--replicas {replicas} starts its processes itself, and submit={launch.submit}, launcher={launch.launcher!r} ask for something else to start "
            "them. Leave both out, and put the command into the job's script."
        )
    if launch.num_processes not in (None, 1) or launch.processes_per_machine not in (None, 1):
        raise ConfigError(
            f"--replicas {replicas} starts one process for each replica, and num_processes={launch.num_processes or launch.processes_per_machine} asks for "
            "more in each; a replica of several processes is not supported. Leave --num_processes out."
        )
    if config.survive.min_replicas > replicas:
        raise ConfigError(
            f"--min_replicas {config.survive.min_replicas} is more than --replicas {replicas}, so the run would wait forever. Give at most {replicas}."
        )
    try:
        check_installed("torchft", why="replicas that may be lost (--replicas)")
    except MissingPackageError as error:
        raise ConfigError(str(error)) from error


def run(plan: LaunchPlan, config: Config, host: Host) -> int:
    """Run the replicas until the run is over; return 0 if one of them has finished it."""
    with tempfile.TemporaryDirectory(prefix="hasten-replicas-") as folder, _lighthouse(config) as address:
        (proc,) = plan.procs
        common = {
            **environment.snapshot(),
            **proc.env,
            **secret.job_token(host.env),
            "HASTEN_SURVIVE_LIGHTHOUSE": address,
            "HASTEN_SURVIVE_FOLDER": folder,
            "HASTEN_REPLICAS": str(config.survive.replicas),
            LAUNCHER_PID: str(os.getpid()),
        }
        if name := interface_of(_LOCAL):
            common.setdefault("GLOO_SOCKET_IFNAME", name)
        devices = 0 if config.cpu else host.num_devices
        crew = Crew(proc, common, Path(folder), config, devices)
        with crew.stopping():
            return crew.run()


@contextmanager
def _lighthouse(config: Config) -> Iterator[str]:
    """Start torchft's lighthouse for the block; yields its address."""
    survive = config.survive
    if survive.lighthouse is not None:
        yield survive.lighthouse
        return
    options = (_LOCAL, str(survive.min_replicas), str(survive.timeout_s), str(survive.heartbeat_timeout_s))
    child = subprocess.Popen(
        [sys.executable, "-m", "hasten.survive.lighthouse", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if config.debug else subprocess.DEVNULL,
        start_new_session=True,
    )
    assert child.stdin is not None, "it is a pipe"
    assert child.stdout is not None, "it is a pipe"
    try:
        line = child.stdout.readline().decode().strip()
        if not line.isdigit():
            raise LaunchError(
                f"torchft's lighthouse did not start (it printed {line!r}), so the replicas could not find each other. Run the command again with "
                "--debug to see its messages."
            )
        yield f"{_LOCAL}:{line}"
    finally:
        child.stdin.close()  # it ends when this closes
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()


@dataclass(slots=True)
class ReplicaProcess:
    """The present process of one replica."""

    process: subprocess.Popen[bytes]
    error_file: str
    began: float
    quick: int
    """Errors of the replica's own program so far, one soon after the other."""


@dataclass(slots=True)
class Crew:
    """The processes of all replicas."""

    proc: Proc
    common: Mapping[str, str]
    folder: Path
    config: Config
    num_devices: int
    workers: dict[int, ReplicaProcess] = field(default_factory=dict)
    stopped_by: int | None = None
    _since: float = 0.0
    _restarts: int = 0
    _finished: float | None = None
    _code: int = 0
    _last: ReplicaProcess | None = None

    def run(self) -> int:
        """Start all replicas, and lost ones again, until none is left to run."""
        for number in range(self.config.survive.replicas):
            self._start(number)
        try:
            while self.workers:
                self._look()
                self._hurry()
                time.sleep(_POLL_S)
        finally:
            kill_groups([worker.process.pid for worker in self.workers.values()])
        return self._result()

    def _start(self, number: int, quick: int = 0) -> None:
        error_file = str(self.folder / f"error-{number}-{self._restarts}.json")
        variables = {**self.common, "HASTEN_SURVIVE_REPLICA": str(number), ERROR_FILE: error_file}
        if self.num_devices:
            variables["CUDA_VISIBLE_DEVICES"] = str(number % self.num_devices)
        process = subprocess.Popen(self.proc.argv, env=variables, start_new_session=True)
        self.workers[number] = ReplicaProcess(process, error_file, time.monotonic(), quick)

    def _look(self) -> None:
        for number, worker in list(self.workers.items()):
            code = worker.process.poll()
            if code is None:
                continue
            kill_groups([worker.process.pid])  # its loaders' workers
            del self.workers[number]
            (self.folder / f"{_JOINED}{number}").unlink(missing_ok=True)
            if code == 0:
                self._finished = self._finished or time.monotonic()
                (self.folder / _FINISHED).touch()
            elif self.stopped_by is not None:
                self._code = code
            elif self._finished is None:
                self._lost(number, worker, code)

    def _lost(self, number: int, worker: ReplicaProcess, code: int) -> None:
        self._code, self._last = code, worker
        quick = worker.quick + 1 if code > 0 and time.monotonic() - worker.began < _QUICK_S else 0
        if error := _failure(worker, code).traceback.rstrip():
            _say(f"the error of replica {number}:\n{error}")
        if quick >= _QUICK_FAILURES or self._restarts >= self.config.survive.max_restarts:
            _say(
                f"replica {number} ended with {end_words(code)} and is not started again; {len(self.workers)} are left"
            )
            return
        self._restarts += 1
        _say(f"replica {number} ended with {end_words(code)}; it is started again, {len(self.workers)} continue")
        self._start(number, quick)

    def _hurry(self) -> None:
        """End replicas that are still there long after the run was finished, or after a signal."""
        now, survive = time.monotonic(), self.config.survive
        late = self._finished is not None and now - self._finished > survive.heal_timeout_s
        if late or (self.stopped_by is not None and now - self._since > self.config.launch.stop_grace_s):
            kill_groups([worker.process.pid for worker in self.workers.values()])

    def _result(self) -> int:
        if self._finished is not None:
            return 0
        if self.stopped_by is not None:
            return PREEMPTED if self._code == PREEMPTED else 128 + self.stopped_by
        worker = self._last
        assert worker is not None, "a run that was not finished has lost a replica"
        failure = _failure(worker, self._code)
        _say(render_failure([failure], python=sys.executable))
        return failure.exit_code or 1

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Context manager that forwards signals to all replicas; a second signal kills them."""

        def forward(number: int, frame: FrameType | None) -> None:
            again = self.stopped_by is not None
            self.stopped_by, self._since = number, time.monotonic()
            for worker in self.workers.values():
                os.killpg(worker.process.pid, signal.SIGKILL if again else number)

        old = {number: signal.signal(number, forward) for number in STOPPING}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def _failure(worker: ReplicaProcess, code: int) -> Failure:
    """Return the end of a replica's process, with the error that it has recorded."""
    return read_failure(
        0, socket.gethostname(), code, worker.process.pid, error_file=worker.error_file, time=time.time()
    )


def _say(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"[hasten] {text}\n")
    sys.stderr.flush()
