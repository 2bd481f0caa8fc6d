"""Runs a plan's processes under torch's elastic agent and tells how they ended. Imports torch: loaded by `run` alone."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from torch.distributed import DistError
from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous.api import RendezvousError

from hasten.errors import LaunchError
from hasten.launch import verdict
from hasten.launch.base import LaunchPlan, Meeting, Supervision
from hasten.launch.checkin import Report
from hasten.launch.elastic import elastic_handler
from hasten.launch.failure import PREEMPTED, Failure, first_failure, read_failure, render_failure
from hasten.launch.guard import SAVING, Interrupted, SignalGuard, kill_groups
from hasten.launch.peers import PeerMachineFailed, Peers
from hasten.launch.rendezvous import CheckIn, ElasticRendezvous, FixedRendezvous, with_address

Say = Callable[[str], None]
Handler = FixedRendezvous | ElasticRendezvous

_SHUTDOWN_S: Final = 15
_COLLECT_S: Final = 3.0


class Agent(LocalElasticAgent):
    """Torch's agent, which besides remembers how processes failed and leaves none of their children behind."""

    def __init__(
        self, spec: WorkerSpec, logs: DefaultLogsSpecs, handler: Handler, say: Say, stop_grace_s: float
    ) -> None:
        super().__init__(spec, logs, exit_barrier_timeout=60, shutdown_timeout=_SHUTDOWN_S)
        self._stop_grace_s = stop_grace_s
        self.failures: list[Failure] = []
        self.groups: set[int] = set()
        self._handler = handler
        self._say = say

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        """Start them with the job's count of rounds as their restart count: it is part of names that ranks must share."""
        self.failures = []
        own, most = self._remaining_restarts, worker_group.spec.max_restarts
        self._remaining_restarts = most - self._handler.round
        started: dict[int, int] = super()._start_workers(worker_group)
        # Machines that may come and go do not use up restarts; those of a fixed set share one budget.
        elastic = isinstance(self._handler, ElasticRendezvous)
        self._remaining_restarts = own if elastic else max(0, self._remaining_restarts)
        self.groups.update(started.values())
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            self.failures = _failures_of(result)
            kill_groups(self.groups)  # loader processes of ranks that died without ending them
            self.groups.clear()
            if self._remaining_restarts > 0:
                self._tell_restart()
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = _SHUTDOWN_S) -> None:
        """End the processes; when told to from outside they may save first, and that takes the time it takes."""
        told = isinstance(sys.exception(), SignalException) and death_sig in SAVING
        super()._shutdown(death_sig, math.ceil(self._stop_grace_s) if told else timeout)

    def all_saved(self) -> bool:
        """Whether every process of this machine ended with the code of a preempted run that has saved."""
        started = getattr(self._pcontext, "subprocess_handlers", {})  # torch keeps the exit codes nowhere else
        return bool(started) and all(handler.proc.poll() == PREEMPTED for handler in started.values())

    def _tell_restart(self) -> None:
        most = self._worker_group.spec.max_restarts
        number = most - self._remaining_restarts + 1
        self._say(render_failure(self.failures))
        self._say(f"restart {number} of {most}")

    def _exit_barrier(self) -> None:
        if isinstance(self._handler, FixedRendezvous):
            self._handler.wait_done()
        else:
            super()._exit_barrier()  # type: ignore[no-untyped-call]  # torch leaves it so


def run_agent(plan: LaunchPlan, report: Report, say: Say) -> int:
    """The exit code of the job, after its processes have run on this machine (and on the others).

    The processes inherit this process's environment, so the plan's variables must be set in it.
    """
    meeting, supervision = plan.meeting, plan.supervision
    assert meeting is not None, "a torchrun plan has a meeting"
    _quieten_torch(supervision)
    check_in = CheckIn(with_address(report, meeting), supervision, say, meeting.join_timeout_s)
    with tempfile.TemporaryDirectory(prefix="hasten-launch-") as scratch:
        agent: Agent | None = None
        guard = SignalGuard(
            lambda: agent.groups if agent else (),
            grace_s=_SHUTDOWN_S + 5,
            saving_grace_s=supervision.stop_grace_s + 5,
            last_words=say,
        )
        with guard:
            try:
                handler = _handler(meeting, check_in)
                agent = Agent(_spec(plan, handler), _logs(supervision, scratch), handler, say, supervision.stop_grace_s)
                code = _outcome(agent, handler, supervision, say)
                handler.shutdown()  # not after a signal: the other machines of an elastic job may go on
                return code
            except (SignalException, Interrupted) as stop:
                number = stop.sigval if isinstance(stop, SignalException) else stop.number
                name = signal.Signals(number).name
                if agent is not None and agent.all_saved():
                    say(f"{name}: all processes of this machine have saved and ended; start again to go on")
                    return PREEMPTED
                say(f"{name}: all processes of this machine were ended")
                return 128 + number
            finally:
                if agent is not None:
                    kill_groups(agent.groups)


def _outcome(agent: Agent, handler: Handler, supervision: Supervision, say: Say) -> int:
    """Run to the end, and put the end into words."""
    try:
        result: RunResult | None = agent.run()
    except PeerMachineFailed as error:
        return _tell_failure(agent.failures + list(error.failures), handler.peers, supervision, say)
    except (LaunchError, RendezvousError, DistError) as error:
        words = f"{error}" if isinstance(error, LaunchError) else f"the machines could not meet: {error}"
        say(words)
        verdict.leave(words)
        if agent.failures:
            say(render_failure(agent.failures, python=sys.executable))
        return 1
    if result is None or not result.is_failed():  # None: the job has ended while this machine wanted to join
        agent.groups.clear()  # what a finished program left running in the background is its own affair
        _leave(handler.peers)
        return 0
    return _tell_failure(agent.failures, handler.peers, supervision, say)


def _tell_failure(failures: Sequence[Failure], peers: Peers | None, supervision: Supervision, say: Say) -> int:
    failures, silent = _with_others(list(failures), peers)
    say(render_failure(failures, python=sys.executable, full=supervision.debug, lost=silent))
    first = first_failure(failures)
    verdict.leave(verdict.failure_words(first, many_machines=peers is not None and len(peers.hosts) > 1))
    return first.exit_code or 1


def _with_others(failures: list[Failure], peers: Peers | None) -> tuple[list[Failure], list[str]]:
    """All machines' failures, and the machines that say nothing any more."""
    if peers is None or len(peers.hosts) == 1:
        return failures, []
    known = {(f.host, f.rank) for f in failures}
    others: list[Failure] = []
    silent: list[str] = [] if peers.index == 0 else [f"machine 0 ({peers.hosts[0]})"]

    def exchange() -> None:
        peers.publish([f for f in failures if f.host == socket.gethostname()])
        others.extend(f for f in peers.collect(_COLLECT_S) if (f.host, f.rank) not in known)
        silent[:] = peers.silent()
        if not silent:
            peers.leave(_COLLECT_S)

    # Machine 0 collects, then serves until the others have read; for them a late answer is an answer from nobody.
    _try_within((2 if peers.index == 0 else 1) * _COLLECT_S + 1, exchange)
    return failures + others, silent


def _leave(peers: Peers | None) -> None:
    if peers is not None and len(peers.hosts) > 1:
        _try_within(2 * _COLLECT_S, lambda: peers.leave(_COLLECT_S))


def _try_within(seconds: float, talk: Callable[[], None]) -> None:
    """Talk to the other machines for some seconds at most: a store whose network is gone never answers."""

    def run() -> None:
        with contextlib.suppress(DistError):  # machine 0 has gone: what is known until then is told
            talk()

    thread = threading.Thread(target=run, name="hasten-last-words", daemon=True)
    thread.start()
    thread.join(seconds)


def _failures_of(result: RunResult) -> list[Failure]:
    """The failures of this machine's ranks; torch lists those it found dead before those it then stopped."""
    host, now = socket.gethostname(), time.time()
    found = [
        read_failure(rank, host, f.exitcode, f.pid, error_file=str(f.error_file or ""), time=now)
        for rank, f in result.failures.items()
    ]
    return [replace(found[0], stopped=False), *found[1:]]


def _spec(plan: LaunchPlan, handler: Handler) -> WorkerSpec:
    argv = plan.procs[0].argv
    return WorkerSpec(
        role=plan.supervision.role,
        local_world_size=len(plan.procs),
        entrypoint=argv[0],
        args=argv[1:],
        rdzv_handler=handler,
        max_restarts=plan.supervision.max_restarts,
        monitor_interval=plan.supervision.monitor_interval_s,
    )


def _logs(supervision: Supervision, scratch: str) -> DefaultLogsSpecs:
    """Where output goes: the terminal by default; with log_dir also or only into files; error files always."""
    keep = supervision.log_dir is not None
    tee = Std.from_str(supervision.tee) if supervision.tee else Std.NONE
    folder = Path(supervision.log_dir or scratch)
    folder.mkdir(parents=True, exist_ok=True)
    redirects = Std.ALL if keep else Std.NONE
    return DefaultLogsSpecs(log_dir=str(folder), redirects=redirects, tee=tee)


def _handler(meeting: Meeting, check_in: CheckIn) -> Handler:
    if meeting.kind == "fixed":
        return FixedRendezvous(meeting, check_in)
    return ElasticRendezvous(elastic_handler(meeting, check_in.report.address), check_in)


def _quieten_torch(supervision: Supervision) -> None:
    """Leave the telling to us: torch's elastic loggers repeat every failure in their own words."""
    if supervision.debug:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
