"""Launch of replicas that may be lost: one or several processes each, a lighthouse for all, and new processes for each lost one."""

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Final

from hasten.config.handoff import pack
from hasten.config.root import Config
from hasten.config.source import SettingEntry, SettingSource
from hasten.errors import ConfigError, LaunchError, MissingPackageError
from hasten.extensions.survive.folder import AGREED, FINISHED, JOINED, STOPPING
from hasten.extensions.survive.replica_machines import (
    MachineClient,
    MachineNetwork,
    MachineNotes,
    MachineServer,
    OneMachine,
    RunNotes,
    own_replicas,
)
from hasten.extensions.survive.replica_processes import ReplicaProcesses, start
from hasten.launch import guard, torchrun
from hasten.launch.base import Host, LaunchPlan, LaunchRequest, LaunchTarget, Proc
from hasten.launch.checkin import make_report
from hasten.launch.failure import PREEMPTED, Failure, end_words, render_failure
from hasten.launch.guard import SAVING, kill_groups
from hasten.launch.network import owns_address
from hasten.launch.shape import decide
from hasten.launch.worker import LAUNCHER_PID
from hasten.optional import check_installed
from hasten.runtime import env as environment
from hasten.runtime import secret

_LOCAL: Final = "127.0.0.1"
_POLL_S: Final = 0.05
_QUICK_S: Final = 60.0
_QUICK_FAILURES: Final = 3
"""Errors of a replica's own program, one after the other and each soon after its start, after which it is not started again."""
_GRACE_S: Final = 15.0
"""Seconds that replicas have to end after Ctrl-C."""
_TOLD_S: Final = 1.0
"""Seconds for which a machine that was told to stop waits for the news that the whole run was."""


def per_replica(config: Config) -> int:
    """Return the number of processes of each replica: `num_processes` counts those of all replicas, over all machines.

    Raises: ConfigError if the replicas cannot have equally many.
    """
    launch, replicas = config.launch, config.survive.replicas
    count = launch.num_processes or (launch.processes_per_machine or 0) * launch.num_machines or replicas
    if count % replicas:
        raise ConfigError(
            f"num_processes={count} counts the processes of all replicas, and --replicas {replicas} cannot have equally many of them. Give a multiple of "
            f"{replicas}, such as {replicas * 2} for replicas of 2 processes, or leave --num_processes out for replicas of one."
        )
    return count // replicas


def one_replica(config: Config) -> tuple[SettingEntry, ...]:
    """Return the settings of one replica, which is a run of its own on one machine."""
    source, count = SettingSource("code", "--replicas"), per_replica(config)
    return (
        SettingEntry(("launch", "num_processes"), count, source),
        SettingEntry(("launch", "processes_per_machine"), None, source),
        SettingEntry(("launch", "launcher"), "single" if count == 1 else "torchrun", source),
        SettingEntry(("launch", "num_machines"), 1, source),
        SettingEntry(("launch", "machine_rank"), None, source),
    )


def check(config: Config) -> None:
    """Raise ConfigError unless the settings describe replicas of equally many processes."""
    launch, replicas = config.launch, config.survive.replicas
    if launch.nnodes is not None:
        raise ConfigError(
            f"--replicas {replicas} divides the replicas over a fixed number of machines, and nnodes={launch.nnodes} asks for a changing one. Give "
            "--num_machines: machines may be lost and return, and --min_replicas says how many replicas the run needs."
        )
    _check_machines(replicas, launch.num_machines)
    if launch.submit not in (None, "slurm") or launch.launcher not in ("auto", "single"):
        raise ConfigError(
            f"--replicas {replicas} starts its processes itself, and submit={launch.submit}, launcher={launch.launcher!r} ask for something else to start "
            "them. Leave both out, and put the command into the job's script; for SLURM, --submit slurm writes one."
        )
    per_replica(config)
    if config.survive.min_replicas > replicas:
        raise ConfigError(
            f"--min_replicas {config.survive.min_replicas} is more than --replicas {replicas}, so the run would wait forever. Give at most {replicas}."
        )


def _check_torchft_is_installed(request: LaunchRequest, host: Host) -> Host:
    try:
        check_installed("torchft", why="replicas that may be lost (--replicas)")
    except MissingPackageError as error:
        raise ConfigError(str(error)) from error
    return host


def _check_machines(replicas: int, machines: int) -> None:
    if machines > replicas:
        raise ConfigError(
            f"--replicas {replicas} leaves some of the {machines} machines without a replica. Give at least as many replicas as machines."
        )


def _is_chosen(request: LaunchRequest) -> bool:
    config = request.config
    if config.survive.replicas == 0 or config.survive.replica is not None:  # this process is one of the replicas
        return False
    check(config)
    return config.launch.submit is None  # a batch script starts the replicas where it runs


def make_plan(request: LaunchRequest, host: Host) -> LaunchPlan:
    """Return the plan of one replica, with the rendezvous of the machines."""
    replica_entries = {entry.path: entry for entry in one_replica(request.config)}
    handoff = pack({**request.entries, **replica_entries})
    shape = decide(request, host)
    if shape.allocation.rank is not None:
        raise ConfigError(
            f"{shape.allocation.source} has started several tasks on this machine, and with --replicas one launcher for each machine starts the replicas. "
            "Start one task for each machine, such as srun --ntasks-per-node=1."
        )
    _check_machines(request.config.survive.replicas, shape.max_machines)
    notes = list(shape.notes)
    meeting = torchrun.make_meeting(request, host, shape, notes)
    if meeting.machine_rank is None and owns_address(meeting.address):
        meeting = replace(meeting, machine_rank=0)
    rank, replicas = meeting.machine_rank, request.config.survive.replicas
    here = "as machine 0 says" if rank is None else _names(own_replicas(replicas, meeting.max_machines, rank))
    notes.append(f"replicas of this machine: {here} of {request.config.survive.replicas}")
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"} if shape.allocation.source else {}
    one = replace(shape, num_processes=1, notes=tuple(notes))
    plan = torchrun.plan_single(replace(request, handoff=handoff), host, one)
    count = per_replica(request.config)
    procs = tuple(
        replace(proc, env={**proc.env, environment.CONFIG: handoff, **variables}, count=count) for proc in plan.procs
    )
    return replace(plan, procs=procs, meeting=meeting)


def _names(numbers: range) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def run(plan: LaunchPlan, config: Config, host: Host) -> int:
    """Run the replicas of this machine until the run is over; return 0 if a replica, of any machine, has finished it."""
    meeting = plan.meeting
    assert meeting is not None, "a plan of replicas has the rendezvous of its machines"
    with tempfile.TemporaryDirectory(prefix="hasten-replicas-") as folder, _network(plan, config, host) as network:
        (proc,) = plan.procs
        common = {
            **environment.snapshot(),
            **proc.env,
            **(secret.job_token(host.env) if meeting.alone else {}),
            "HASTEN_SURVIVE_LIGHTHOUSE": network.lighthouse,
            "HASTEN_SURVIVE_FOLDER": folder,
            "HASTEN_REPLICAS": str(config.survive.replicas),
            LAUNCHER_PID: str(os.getpid()),
        }
        devices = 0 if config.cpu else host.num_devices
        if 0 < devices < proc.count:
            raise ConfigError(
                f"each replica has {proc.count} processes, and this machine has {devices} device(s), so two processes of a replica would share one. Give "
                f"--num_processes at most {devices} for each replica, or --cpu."
            )
        numbers = own_replicas(config.survive.replicas, meeting.max_machines, network.rank)
        crew = Crew(proc, common, Path(folder), config, numbers, network)
        crew.num_devices = devices
        crew.patience_s = meeting.join_timeout_s
        with crew.stopping():
            code = crew.run()
        network.close(code)
        return code


TARGET: Final = LaunchTarget(
    name="replicas", is_chosen=_is_chosen, plan=make_plan, survey=_check_torchft_is_installed, run=run
)


@contextmanager
def _network(plan: LaunchPlan, config: Config, host: Host) -> Iterator[MachineNetwork]:
    """Connect this machine to the others for the block; machine 0 also starts the lighthouse."""
    meeting = plan.meeting
    assert meeting is not None, "a plan of replicas has the rendezvous of its machines"
    if meeting.alone:
        with _lighthouse(config, _LOCAL) as address:
            yield OneMachine(address)
        return
    report = make_report(plan, config, host, alone=False)
    token = secret.given_token(host.env) or secret.user_secret(host.env)
    if meeting.machine_rank != 0:
        yield MachineClient(meeting, report, token, _say)
        return
    server = MachineServer(meeting, report, config.launch.check_in, token, _say)
    with _lighthouse(config, str(socket.getaddrinfo(meeting.address, None)[0][4][0])) as address:
        server.lighthouse = address
        yield server


@contextmanager
def _lighthouse(config: Config, host: str) -> Iterator[str]:
    """Start torchft's lighthouse at an address of this machine for the block; yields host and port."""
    survive = config.survive
    if survive.lighthouse is not None:
        yield survive.lighthouse
        return
    options = (host, str(survive.min_replicas), str(survive.timeout_s), str(survive.heartbeat_timeout_s))
    child = subprocess.Popen(
        [sys.executable, "-m", "hasten.extensions.survive.lighthouse", *options],
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
        yield f"[{host}]:{line}" if ":" in host else f"{host}:{line}"
    finally:
        child.stdin.close()  # it ends when this closes
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()


@dataclass(slots=True)
class Crew:
    """The processes of this machine's replicas."""

    proc: Proc
    common: Mapping[str, str]
    folder: Path
    config: Config
    numbers: range
    network: MachineNetwork
    num_devices: int = 0
    patience_s: float = 120.0
    """Seconds for which a machine waits for machine 0 when that does not respond."""
    workers: dict[int, ReplicaProcesses] = field(default_factory=dict)
    stopped_by: int | None = None
    _since: float = 0.0
    _waiting: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Replicas to be started: the number of their errors, and the earliest time."""
    _broken_at: float = -_QUICK_S
    _restarts: int = 0
    _finished: float | None = None
    _is_held: bool = False
    """True if a replica, of any machine, held the run's state at the latest look."""
    _codes: list[int] = field(default_factory=list)
    """Exit codes of replicas that ended after the signal to stop, or were preempted alone."""
    _last: Failure | None = None
    _run: RunNotes = field(default_factory=RunNotes)

    def run(self) -> int:
        """Start this machine's replicas, and lost ones again, until the run is over."""
        self._waiting = dict.fromkeys(self.numbers, (0, 0.0))
        try:
            while self._goes_on():
                self._look()
                self._tell()
                self._start_anew()
                self._pass_on()
                self._hurry()
                time.sleep(_POLL_S)
        finally:
            kill_groups([group for worker in self.workers.values() for group in worker.groups])
        return self._result()

    def _goes_on(self) -> bool:
        """Return False when the run is over for this machine."""
        if self._run.code is not None:
            return False
        if self.network.broken_s > self.patience_s:
            return False
        if self.workers or self._waiting:
            return True
        if self.network.rank == 0:  # the lighthouse is here: replicas of other machines need it
            return self._run.running > 0
        return self.stopped_by is None  # machine 0 tells when the run is over

    def _start(self, number: int, quick: int = 0) -> None:
        count = self.proc.count
        common = {**self.common, "HASTEN_SURVIVE_REPLICA": str(number)}
        if self.num_devices:
            first = (number - self.numbers[0]) * count
            devices = [(first + rank) % self.num_devices for rank in range(count)]
            common["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        error_file = str(self.folder / f"error-{number}-{self._restarts}")
        self.workers[number] = start(self.proc, common, error_file, quick)

    def _look(self) -> None:
        for number, worker in list(self.workers.items()):
            found = worker.look()
            saves = self.stopped_by is not None or (found is not None and found[1] == PREEMPTED)
            if found is None or (saves and worker.running):  # after a signal, ranks may save as long as the grace lasts
                continue
            rank, code = found
            worker.end()  # a replica trains with all of its ranks, or not at all
            del self.workers[number]
            (self.folder / f"{JOINED}{number}").unlink(missing_ok=True)
            if code == 0:
                self._finished = self._finished or time.monotonic()
                (self.folder / FINISHED).touch()
            elif self.stopped_by is not None:
                self._codes.append(code)
                self._last = worker.failure(rank, code)
            elif self._finished is None:
                self._lost(number, worker, rank, code)
        if self._finished is not None or self.stopped_by is not None:
            self._waiting = {}
        for number, (quick, due) in list(self._waiting.items()):
            if time.monotonic() >= due and not self.network.broken_s:
                self._start(number, quick)
                del self._waiting[number]

    def _start_anew(self) -> None:
        """End and start the replicas that are left once the last one that held the run's state was lost.

        They have the state with which their scripts began; new ones load the newest checkpoint, if the script loads any.
        """
        was_held, self._is_held = self._is_held, any(self.folder.glob(f"{JOINED}*"))
        if self._is_held or not was_held or self._finished is not None or self.stopped_by is not None:
            return
        _say(
            "every replica that held the run's state is lost. All replicas start the script again: it continues from the newest checkpoint if "
            "it calls load_state(must_exist=False), and from the beginning otherwise"
        )
        for number, worker in self.workers.items():
            worker.end()
            self._waiting[number] = (0, 0.0)
        self.workers.clear()

    def _lost(self, number: int, worker: ReplicaProcesses, rank: int, code: int) -> None:
        self._last = worker.failure(rank, code)
        blamed = code > 0 and code != PREEMPTED and time.monotonic() - self._broken_at > _QUICK_S
        quick = worker.quick + 1 if blamed and time.monotonic() - worker.began < _QUICK_S else 0
        if error := self._last.traceback.rstrip():
            _say(f"the error of replica {number}:\n{error}")
        which = f"replica {number}" if len(worker.processes) == 1 else f"rank {rank} of replica {number}"
        if quick >= _QUICK_FAILURES or self._restarts >= self.config.survive.max_restarts:
            _say(f"{which} ended with {end_words(code)} and is not started again; {len(self.workers)} are left")
            return
        self._restarts += 1
        again = "it is" if len(worker.processes) == 1 else "the replica is"
        _say(f"{which} ended with {end_words(code)}; {again} started again, {len(self.workers)} continue")
        due = 0.0
        if code == PREEMPTED:  # the signal may have been for the whole run, and this launcher learns it a moment later
            self._codes.append(code)
            due = time.monotonic() + _TOLD_S
        self._waiting[number] = (quick, due)

    # -- other machines --------------------------------------------------------------------------------------------
    def _tell(self) -> None:
        """Tell the other machines what the replicas of this one have noted in the folder, and note what the others have told."""
        if self.network.broken_s:
            self._broken_at = time.monotonic()
        run = self._run = self.network.exchange(self._notes(), self.stopped_by)
        agreed = self.folder / AGREED
        if run.agreed and run.agreed != _text(agreed):
            draft = self.folder / f"{AGREED}.launcher"
            draft.write_text(run.agreed)
            draft.replace(agreed)
        if run.finished and self._finished is None:
            self._finished = time.monotonic()
            (self.folder / FINISHED).touch()
        noted = {path.name.removeprefix(JOINED) for path in self.folder.glob(f"{JOINED}*")}
        own = set(map(str, self.numbers))
        for name in set(run.joined) - noted - own:
            (self.folder / f"{JOINED}{name}").touch()
        for name in noted - set(run.joined) - own:
            (self.folder / f"{JOINED}{name}").unlink(missing_ok=True)

    def _notes(self) -> MachineNotes:
        return MachineNotes(
            running=len(self.workers) + len(self._waiting),
            joined=[str(number) for number in self.workers if (self.folder / f"{JOINED}{number}").exists()],
            agreed=_text(self.folder / AGREED),
            finished=self._finished is not None,
        )

    # -- the end ---------------------------------------------------------------------------------------------------
    def _pass_on(self) -> None:
        """Send the signal to stop to the replicas that have not received it; they end together if the whole run was told to stop."""
        if self.stopped_by is None and self._run.stop is not None:
            self.stopped_by, self._since = self._run.stop, time.monotonic()
        if self.stopped_by is None:
            return
        whole = self.network.rank == 0 or self._run.stop is not None
        if not whole and time.monotonic() - self._since < _TOLD_S:
            return
        if whole:
            (self.folder / STOPPING).touch()
        for worker in self.workers.values():
            if not worker.signalled:
                worker.signalled = True
                worker.send(self.stopped_by)

    def _hurry(self) -> None:
        """End replicas that are still there long after the run was finished, or after a signal."""
        now, survive = time.monotonic(), self.config.survive
        late = self._finished is not None and now - self._finished > survive.heal_timeout_s
        grace_s = self.config.launch.stop_grace_s if self.stopped_by in SAVING else _GRACE_S
        if late or (self.stopped_by is not None and now - self._since > grace_s):
            kill_groups([group for worker in self.workers.values() for group in worker.groups])

    def _result(self) -> int:
        if self._run.code is not None:
            return self._run.code
        if self._finished is not None:
            return 0
        if self.stopped_by is not None:
            return self._stopped(self.stopped_by)
        if self.network.broken_s:
            _say(
                f"machine 0 does not respond for {self.network.broken_s:.0f} s, and the lighthouse is there: the run has ended. Start it again from a "
                "checkpoint."
            )
            return 1
        if self._last is None:
            return 1
        failure = self._last
        _say(render_failure([failure], python=sys.executable))
        return failure.exit_code or 1

    def _stopped(self, number: int) -> int:
        """Return the exit code after a signal: that of a saved run if the replicas have saved, and none of them has failed.

        A replica that the signal ends is one that had no handler yet: it was being started, and the others save without it.
        """
        name = signal.Signals(number).name
        if failed := [code for code in self._codes if code not in (PREEMPTED, -number)]:
            if self._last is not None and self._last.code in failed and self._last.code > 0:
                _say(render_failure([self._last], python=sys.executable))
            return failed[0] if failed[0] > 0 else 128 + number
        if PREEMPTED in self._codes:
            _say(f"{name}: the run was saved, and its replicas have ended; start it again to continue")
            return PREEMPTED
        return 128 + number

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Context manager in which signals end all replicas; a second signal kills them, unless schedulers repeat it."""

        def receive(number: int, frame: FrameType | None) -> None:
            if self.stopped_by in SAVING and number in SAVING:
                return  # a repeated signal must not interrupt a save
            if self.stopped_by is not None:
                kill_groups([group for worker in self.workers.values() for group in worker.groups])
                return
            self.stopped_by, self._since = number, time.monotonic()

        old = {number: signal.signal(number, receive) for number in guard.STOPPING}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def _text(path: Path) -> str:
    """Return the text of a file, empty for none."""
    return path.read_text() if path.exists() else ""


def _say(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"[hasten] {text}\n")
    sys.stderr.flush()
