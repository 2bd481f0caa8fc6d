"""Execution of a plan's processes under torch's elastic agent. Imports torch, so only `run` loads it."""

from __future__ import annotations

import logging
import math
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    SignalException,
    Std,
)
from torch.distributed.elastic.rendezvous.api import RendezvousError

from hasten.errors import LaunchError
from hasten.launch import failure as verdict
from hasten.launch.base import LaunchPlan, Meeting, Supervision
from hasten.launch.checkin import Report
from hasten.launch.elastic.handler import elastic_handler
from hasten.launch.elastic.peers import (
    COLLECT_S,
    MachineLost,
    PeerMachineFailed,
    Peers,
    agreed_exit_code,
    with_others,
    within,
)
from hasten.launch.elastic.rendezvous import (
    CheckIn,
    ElasticRendezvous,
    FixedRendezvous,
    with_address,
)
from hasten.launch.elastic.torch_agent import SHUTDOWN_S, End, TorchAgent
from hasten.launch.failure import (
    PREEMPTED,
    STALLED,
    Failure,
    end_after_signal,
    first_failure,
    read_failure,
    render_failure,
)
from hasten.launch.guard import SAVING, Interrupted, SignalGuard, kill_groups
from hasten.runtime import env as environment
from hasten.runtime import launcher_files

Say = Callable[[str], None]
Handler = FixedRendezvous | ElasticRendezvous


class MachineSupervisor:
    """Supervisor of one machine's processes: records their failures and kills their leftover children."""

    def __init__(
        self, handler: Handler, supervision: Supervision, guard: SignalGuard, say: Say
    ) -> None:
        self._handler = handler
        self._supervision = supervision
        self._guard = guard
        self._say = say
        self.failures: list[Failure] = []
        self.groups: set[int] = set()
        self._ended: dict[int, int] = {}

    def restart_count(self) -> int:
        """Return the number of restarts of the whole job, not of this machine alone."""
        self.failures = []
        self._ended = {}
        launcher_files.write_ended({}, environment.snapshot())
        return self._handler.round

    def restarts_left(self, agent_restarts: int) -> int:
        """Return the restarts left: machines of a fixed set share one budget; elastic ones use the agent's count."""
        elastic = isinstance(self._handler, ElasticRendezvous)
        return (
            agent_restarts
            if elastic
            else max(0, self._supervision.max_restarts - self._handler.round)
        )

    def started(self, pids: Collection[int]) -> None:
        """Record the process groups."""
        self.groups.update(pids)

    def some_ended(self, process_ends: Sequence[End]) -> None:
        """Report ended processes, while others still run, to the ranks of this machine and to the other machines."""
        codes = {end.rank: end.code for end in process_ends if end.code is not None}
        if codes == self._ended:
            return
        self._ended = codes
        if (peers := self._handler.peers) is not None and len(peers.hosts) > 1:
            # exchanged by the thread that polls the other machines
            peers.ended.update(codes)
        else:
            launcher_files.write_ended(codes, environment.snapshot())

    def failed(self, result: RunResult, restarts_left: int) -> int:
        """Record the failures, kill leftover processes, and return the number of restarts left."""
        self.failures = _failures_of(result)
        # loader workers of ranks that died without stopping them
        kill_groups(self.groups)
        self.groups.clear()
        if restarts_left > 0 and self._told_elsewhere():
            # another machine received a stop signal; the scheduler restarts the whole job
            return 0
        if restarts_left > 0:
            max_restarts = self._supervision.max_restarts
            self._say(render_failure(self.failures))
            self._say(f"restart {max_restarts - restarts_left + 1} of {max_restarts}")
        return restarts_left

    def _told_elsewhere(self) -> bool:
        peers, signalled = self._handler.peers, [False]
        if peers is None or not all(
            f.code == PREEMPTED for f in self.failures if not f.stopped
        ):
            return False

        def ask() -> None:
            signalled[0] = peers.stopping()

        within(COLLECT_S, ask)
        return signalled[0]

    def stopping(self, number: signal.Signals) -> int:
        """Notify the other machines, and return the seconds that the processes may take to save and exit."""
        if number not in SAVING:
            return SHUTDOWN_S
        self._guard.hold()
        if (peers := self._handler.peers) is not None:
            within(1.0, peers.say_stopping)
        return math.ceil(self._supervision.stop_grace_s)

    def finished(self) -> bool:
        """Wait for the other machines of a fixed set; torch does this for an elastic set."""
        if isinstance(self._handler, FixedRendezvous):
            self._handler.wait_done()
            return True
        return False


@dataclass(slots=True)
class _Run:
    """Execution of a job on one machine, from the rendezvous to the exit code."""

    plan: LaunchPlan
    check_in: CheckIn
    say: Say
    guard: SignalGuard
    handler: Handler | None = None
    supervisor: MachineSupervisor | None = None
    agent: TorchAgent | None = None

    def to_the_end(self, scratch: str) -> int:
        """Run to completion and return the exit code of this machine's processes."""
        meeting, supervision = self.plan.meeting, self.plan.supervision
        assert meeting is not None, "a torchrun plan has a meeting"
        self.handler = _handler(meeting, self.check_in)
        self.supervisor = MachineSupervisor(
            self.handler, supervision, self.guard, self.say
        )
        spec, logs = _spec(self.plan, self.handler), _logs(supervision, scratch)
        self.agent = TorchAgent(spec, logs, self.supervisor, self.supervisor.some_ended)
        return self._outcome(self.agent, self.handler, self.supervisor)

    def _outcome(
        self, agent: TorchAgent, handler: Handler, supervisor: MachineSupervisor
    ) -> int:
        """Run the processes, report their failures, and return the exit code."""
        try:
            result: RunResult | None = agent.run()
        except PeerMachineFailed as error:
            self.guard.hold()
            if not (supervisor.failures or error.failures):
                self._fail(str(error))
                return error.code
            return self._tell_failure(
                [*supervisor.failures, *error.failures], handler.peers
            )
        except (LaunchError, RendezvousError, DistError) as error:
            self.guard.hold()
            self._fail(
                f"{error}"
                if isinstance(error, LaunchError)
                else f"the rendezvous failed: {error}"
            )
            if supervisor.failures:
                self.say(render_failure(supervisor.failures, python=sys.executable))
            return STALLED if isinstance(error, MachineLost) else 1
        self.guard.hold()
        # None: the job ended while this machine was waiting to join
        if result is None or not result.is_failed():
            # background processes of a program that succeeded are left running
            supervisor.groups.clear()
            return 0
        return self._tell_failure(supervisor.failures, handler.peers)

    def _fail(self, words: str) -> None:
        self.say(words)
        verdict.leave(words)

    def _tell_failure(self, failures: Sequence[Failure], peers: Peers | None) -> int:
        host, time_s = socket.gethostname(), time.time()
        process_ends = self.agent.ends() if self.agent is not None else []
        left_early = [
            Failure(end.rank, host, 0, time_s, end.pid)
            for end in process_ends
            if end.code == 0
        ]
        failures, silent = with_others([*failures, *left_early], peers)
        self.say(
            render_failure(
                failures,
                python=sys.executable,
                full=self.plan.supervision.debug,
                lost=silent,
            )
        )
        first = first_failure(failures)
        verdict.leave(
            verdict.failure_words(
                first, many_machines=peers is not None and len(peers.hosts) > 1
            )
        )
        return first.exit_code or 1

    def stopped(self, number: int) -> int:
        """Return the exit code after a signal."""
        self.guard.hold()
        name = signal.Signals(number).name
        if self.agent is None or not self.agent.num_started:
            self.say(f"{name}: the job has not started, and nothing was saved")
            return 128 + number
        codes = [end.code for end in self.agent.ends()]
        code, end_words = end_after_signal(
            number, codes if len(codes) == self.agent.num_started else []
        )
        self.say(f"{name}: all processes of this machine {end_words}")
        return code

    def agreed(self, code: int) -> int:
        """Return the exit code on which the machines agree; later signals no longer change it."""
        if self.plan.meeting is None or self.plan.meeting.alone:
            return code
        self.guard.settle(code)
        peers = self.handler.peers if self.handler is not None else None
        code = agreed_exit_code(
            peers, code, saving_s=self.plan.supervision.stop_grace_s
        )
        self.guard.settle(code)
        return code

    def groups(self) -> Collection[int]:
        """Return the process groups that may still be alive."""
        return self.supervisor.groups if self.supervisor is not None else ()


def run_agent(plan: LaunchPlan, report: Report, say: Say) -> int:
    """Run the plan's processes on this machine and return the exit code of the job, agreed with the other machines.

    The processes inherit this process's environment, so the plan's variables must be set in it.
    """
    meeting, supervision = plan.meeting, plan.supervision
    assert meeting is not None, "a torchrun plan has a meeting"
    _quieten_torch(supervision)
    check_in = CheckIn(
        with_address(report, meeting), supervision, say, meeting.join_timeout_s
    )
    with tempfile.TemporaryDirectory(prefix="hasten-launch-") as scratch:
        guard = SignalGuard(
            lambda: run.groups(),
            grace_s=SHUTDOWN_S + 5,
            saving_grace_s=supervision.stop_grace_s + 5,
            last_words=say,
        )
        run = _Run(plan, check_in, say, guard)
        with guard:
            try:
                code = run.agreed(run.to_the_end(scratch))
                if run.handler is not None:
                    # not after a signal: the other machines of an elastic job may continue
                    run.handler.shutdown()
                return code
            except (SignalException, Interrupted) as stop:
                return run.agreed(
                    run.stopped(
                        stop.sigval
                        if isinstance(stop, SignalException)
                        else stop.number
                    )
                )
            finally:
                kill_groups(run.groups())


def _failures_of(result: RunResult) -> list[Failure]:
    """Return the failures of this machine's ranks; torch lists ranks that died before ranks that it stopped."""
    host, time_s = socket.gethostname(), time.time()
    failures = [
        read_failure(
            rank,
            host,
            f.exitcode,
            f.pid,
            error_file=str(f.error_file or ""),
            time=time_s,
        )
        for rank, f in result.failures.items()
    ]
    return [replace(failures[0], stopped=False), *failures[1:]]


def _spec(plan: LaunchPlan, handler: Handler) -> WorkerSpec:
    (proc,) = plan.procs
    return WorkerSpec(
        role=plan.supervision.role,
        local_world_size=proc.count,
        entrypoint=proc.argv[0],
        args=proc.argv[1:],
        rdzv_handler=handler,
        max_restarts=plan.supervision.max_restarts,
        monitor_interval=plan.supervision.monitor_interval_s,
    )


def _logs(supervision: Supervision, scratch: str) -> DefaultLogsSpecs:
    """Return the log settings: terminal output by default; with log_dir files instead, or both; error files always."""
    keep = supervision.log_dir is not None
    tee = Std.from_str(supervision.tee) if supervision.tee else Std.NONE
    folder = Path(supervision.log_dir or scratch)
    folder.mkdir(parents=True, exist_ok=True)
    redirects = Std.ALL if keep else Std.NONE
    return DefaultLogsSpecs(log_dir=str(folder), redirects=redirects, tee=tee)


def _handler(meeting: Meeting, check_in: CheckIn) -> Handler:
    if meeting.kind == "fixed":
        return FixedRendezvous(meeting, check_in)
    return ElasticRendezvous(
        elastic_handler(meeting, check_in.report.address), check_in
    )


def _quieten_torch(supervision: Supervision) -> None:
    """Silence torch's elastic loggers, which repeat every failure that hasten already reports."""
    if supervision.debug:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
