"""Launch of replicas that may be lost: one or several processes each, a lighthouse for all, and new processes for each lost one."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
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


def per_replica(config: Config) -> int:
    """Return the number of processes of each replica: `num_processes` counts those of all replicas.

    Raises: ConfigError if the replicas cannot have equally many.
    """
    launch, replicas = config.launch, config.survive.replicas
    count = launch.num_processes or launch.processes_per_machine or replicas
    if count % replicas:
        raise ConfigError(
            f"num_processes={count} counts the processes of all replicas, and --replicas {replicas} cannot have equally many of them. Give a multiple of "
            f"{replicas}, such as {replicas * 2} for replicas of 2 processes, or leave --num_processes out for replicas of one."
        )
    return count // replicas


def one_replica(config: Config) -> tuple[SettingEntry, ...]:
    """Return the settings of the launch of one replica."""
    source, count = SettingSource("code", "--replicas"), per_replica(config)
    return (
        SettingEntry(("launch", "num_processes"), count, source),
        SettingEntry(("launch", "processes_per_machine"), None, source),
        SettingEntry(("launch", "launcher"), "single" if count == 1 else "torchrun", source),
    )


def check(config: Config) -> None:
    """Raise ConfigError unless the settings describe replicas of equally many processes on this machine."""
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
    per_replica(config)
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
        if 0 < devices < proc.count:
            raise ConfigError(
                f"each replica has {proc.count} processes, and this machine has {devices} device(s), so two processes of a replica would share one. Give "
                f"--num_processes at most {devices} for each replica, or --cpu."
            )
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
class ReplicaProcesses:
    """The present processes of one replica, one for each rank."""

    processes: list[subprocess.Popen[bytes]]
    error_files: list[str]
    began: float
    quick: int
    """Errors of the replica's own program so far, one soon after the other."""

    @property
    def groups(self) -> list[int]:
        """The process groups, which include the loaders' workers."""
        return [process.pid for process in self.processes]

    def look(self) -> tuple[int, int] | None:
        """Return the rank that ended the replica, and its exit code; None while the replica runs.

        A rank that was killed ends it rather than one that has met an error, which may be due to the former; of several errors, the
        one that was recorded first.
        """
        codes = [process.poll() for process in self.processes]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            return min(failed, key=lambda one: (one[1] > 0, _time_of(self.error_files[one[0]]), one[0]))
        return None if None in codes else (0, 0)

    def end(self) -> None:
        """Kill all processes, and those that they have started."""
        kill_groups(self.groups)
        for process in self.processes:
            process.wait()


@dataclass(slots=True)
class Crew:
    """The processes of all replicas."""

    proc: Proc
    common: Mapping[str, str]
    folder: Path
    config: Config
    num_devices: int
    workers: dict[int, ReplicaProcesses] = field(default_factory=dict)
    stopped_by: int | None = None
    _since: float = 0.0
    _restarts: int = 0
    _finished: float | None = None
    _code: int = 0
    _last: Failure | None = None

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
            kill_groups([group for worker in self.workers.values() for group in worker.groups])
        return self._result()

    def _start(self, number: int, quick: int = 0) -> None:
        count = self.proc.count
        common = {**self.common, "HASTEN_SURVIVE_REPLICA": str(number)}
        if self.num_devices:
            devices = [(number * count + rank) % self.num_devices for rank in range(count)]
            common["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        if count > 1:
            common |= {"MASTER_ADDR": _LOCAL, "MASTER_PORT": str(_free_port())}
            common |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        processes, error_files = [], []
        for rank in range(count):
            error_files.append(str(self.folder / f"error-{number}-{rank}-{self._restarts}.json"))
            variables = {**common, ERROR_FILE: error_files[rank]}
            if count > 1:
                variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(self.proc.argv, env=variables, start_new_session=True))
        self.workers[number] = ReplicaProcesses(processes, error_files, time.monotonic(), quick)

    def _look(self) -> None:
        for number, worker in list(self.workers.items()):
            found = worker.look()
            stopping = self.stopped_by is not None and any(one.poll() is None for one in worker.processes)
            if found is None or stopping:  # after a signal, ranks may save as long as the grace lasts
                continue
            rank, code = found
            worker.end()  # a replica trains with all of its ranks, or not at all
            del self.workers[number]
            (self.folder / f"{_JOINED}{number}").unlink(missing_ok=True)
            if code == 0:
                self._finished = self._finished or time.monotonic()
                (self.folder / _FINISHED).touch()
            elif self.stopped_by is not None:
                self._code = code
            elif self._finished is None:
                self._lost(number, worker, rank, code)

    def _lost(self, number: int, worker: ReplicaProcesses, rank: int, code: int) -> None:
        self._code, self._last = code, _failure(worker, rank, code)
        quick = worker.quick + 1 if code > 0 and time.monotonic() - worker.began < _QUICK_S else 0
        if error := self._last.traceback.rstrip():
            _say(f"the error of replica {number}:\n{error}")
        which = f"replica {number}" if len(worker.processes) == 1 else f"rank {rank} of replica {number}"
        if quick >= _QUICK_FAILURES or self._restarts >= self.config.survive.max_restarts:
            _say(f"{which} ended with {end_words(code)} and is not started again; {len(self.workers)} are left")
            return
        self._restarts += 1
        again = "it is" if len(worker.processes) == 1 else "the replica is"
        _say(f"{which} ended with {end_words(code)}; {again} started again, {len(self.workers)} continue")
        self._start(number, quick)

    def _hurry(self) -> None:
        """End replicas that are still there long after the run was finished, or after a signal."""
        now, survive = time.monotonic(), self.config.survive
        late = self._finished is not None and now - self._finished > survive.heal_timeout_s
        if late or (self.stopped_by is not None and now - self._since > self.config.launch.stop_grace_s):
            kill_groups([group for worker in self.workers.values() for group in worker.groups])

    def _result(self) -> int:
        if self._finished is not None:
            return 0
        if self.stopped_by is not None:
            return PREEMPTED if self._code == PREEMPTED else 128 + self.stopped_by
        failure = self._last
        assert failure is not None, "a run that was not finished has lost a replica"
        _say(render_failure([failure], python=sys.executable))
        return failure.exit_code or 1

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Context manager that forwards signals to all replicas; a second signal kills them."""

        def forward(number: int, frame: FrameType | None) -> None:
            again = self.stopped_by is not None
            self.stopped_by, self._since = number, time.monotonic()
            for group in [group for worker in self.workers.values() for group in worker.groups]:
                with suppress(ProcessLookupError):  # a rank that has ended before the others of its replica
                    os.killpg(group, signal.SIGKILL if again else number)

        old = {number: signal.signal(number, forward) for number in STOPPING}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def _failure(worker: ReplicaProcesses, rank: int, code: int) -> Failure:
    """Return the end of a replica's rank, with the error that it has recorded."""
    pid, error_file = worker.processes[rank].pid, worker.error_files[rank]
    return read_failure(rank, socket.gethostname(), code, pid, error_file=error_file, time=time.time())


def _time_of(path: str) -> float:
    """Return the time at which a file was written; infinity if there is none."""
    try:
        return Path(path).stat().st_mtime
    except OSError:  # the process was killed, or has ended without an error
        return math.inf


def _free_port() -> int:
    """Return a port that is free now, for the meeting of a replica's ranks."""
    with socket.create_server((_LOCAL, 0)) as probe:
        return int(probe.getsockname()[1])


def _say(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"[hasten] {text}\n")
    sys.stderr.flush()
