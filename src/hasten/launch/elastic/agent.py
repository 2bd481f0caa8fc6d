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
    COLLECT_TIMEOUT_S,
    MachineLost,
    PeerMachineFailed,
    Peers,
    agreed_exit_code,
    run_within,
    with_others,
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
        is_elastic = isinstance(self._handler, ElasticRendezvous)
        if is_elastic:
            return agent_restarts
        return max(0, self._supervision.max_restarts - self._handler.round)

    def handle_start(self, pids: Collection[int]) -> None:
        """Record the process groups."""
        self.groups.update(pids)

    def some_ended(self, process_ends: Sequence[End]) -> None:
        """Report ended processes, while others still run, to the ranks of this machine and to the other machines."""
        exit_codes = {}
        for process_end in process_ends:
            if process_end.code is not None:
                exit_codes[process_end.rank] = process_end.code
        if exit_codes == self._ended:
            return
        self._ended = exit_codes
        if (peers := self._handler.peers) is not None and len(peers.hosts) > 1:
            # exchanged by the thread that polls the other machines
            peers.ended.update(exit_codes)
        else:
            launcher_files.write_ended(exit_codes, environment.snapshot())

    def handle_failure(self, result: RunResult, restarts_left: int) -> int:
        """Record the failures, kill leftover processes, and return the number of restarts left."""
        self.failures = _failures_of(result)
        # loader workers of ranks that died without stopping them
        kill_groups(self.groups)
        self.groups.clear()
        if restarts_left > 0 and self._other_was_signalled():
            # another machine received a stop signal; the scheduler restarts the whole job
            return 0
        if restarts_left > 0:
            max_restarts = self._supervision.max_restarts
            self._say(render_failure(self.failures))
            self._say(f"restart {max_restarts - restarts_left + 1} of {max_restarts}")
        return restarts_left

    def _other_was_signalled(self) -> bool:
        peers = self._handler.peers
        was_signalled = [False]
        if peers is None or not all(
            failure.code == PREEMPTED
            for failure in self.failures
            if not failure.stopped
        ):
            return False

        def read_signalled() -> None:
            was_signalled[0] = peers.is_stopping()

        run_within(COLLECT_TIMEOUT_S, read_signalled)
        return was_signalled[0]

    def handle_stop(self, number: signal.Signals) -> int:
        """Notify the other machines, and return the seconds that the processes may take to save and exit."""
        if number not in SAVING:
            return SHUTDOWN_S
        self._guard.hold_signals()
        if (peers := self._handler.peers) is not None:
            run_within(1.0, peers.say_stopping)
        return math.ceil(self._supervision.stop_grace_s)

    def is_finished(self) -> bool:
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

    def run_processes(self, scratch: str) -> int:
        """Run to completion and return the exit code of this machine's processes."""
        meeting = self.plan.meeting
        supervision = self.plan.supervision
        assert meeting is not None, "a torchrun plan has a meeting"
        self.handler = _rendezvous_handler(meeting, self.check_in)
        self.supervisor = MachineSupervisor(
            self.handler, supervision, self.guard, self.say
        )
        worker_spec = _worker_spec(self.plan, self.handler)
        logs_specs = _logs_specs(supervision, scratch)
        self.agent = TorchAgent(
            worker_spec, logs_specs, self.supervisor, self.supervisor.some_ended
        )
        return self._run_agent(self.agent, self.handler, self.supervisor)

    def _run_agent(
        self, agent: TorchAgent, handler: Handler, supervisor: MachineSupervisor
    ) -> int:
        """Run the processes, report their failures, and return the exit code."""
        try:
            run_result: RunResult | None = agent.run()
        except PeerMachineFailed as error:
            self.guard.hold_signals()
            if not (supervisor.failures or error.failures):
                self._say_reason(str(error))
                return error.code
            return self._report_failures(
                [*supervisor.failures, *error.failures], handler.peers
            )
        except (LaunchError, RendezvousError, DistError) as error:
            self.guard.hold_signals()
            self._say_reason(
                f"{error}"
                if isinstance(error, LaunchError)
                else f"the rendezvous failed: {error}"
            )
            if supervisor.failures:
                self.say(render_failure(supervisor.failures, python=sys.executable))
            return STALLED if isinstance(error, MachineLost) else 1
        self.guard.hold_signals()
        # None: the job ended while this machine was waiting to join
        if run_result is None or not run_result.is_failed():
            # background processes of a program that succeeded are left running
            supervisor.groups.clear()
            return 0
        return self._report_failures(supervisor.failures, handler.peers)

    def _say_reason(self, words: str) -> None:
        self.say(words)
        verdict.write_verdict(words)

    def _report_failures(self, failures: Sequence[Failure], peers: Peers | None) -> int:
        host = socket.gethostname()
        time_s = time.time()
        process_ends = self.agent.ended_processes() if self.agent is not None else []
        left_early = []
        for process_end in process_ends:
            if process_end.code == 0:
                left_early.append(
                    Failure(process_end.rank, host, 0, time_s, process_end.pid)
                )
        failures, silent_machines = with_others([*failures, *left_early], peers)
        self.say(
            render_failure(
                failures,
                python=sys.executable,
                is_full=self.plan.supervision.debug,
                lost_machines=silent_machines,
            )
        )
        first_cause = first_failure(failures)
        verdict.write_verdict(
            verdict.failure_words(
                first_cause, many_machines=peers is not None and len(peers.hosts) > 1
            )
        )
        return first_cause.exit_code or 1

    def stop_job(self, number: int) -> int:
        """Return the exit code after a signal."""
        self.guard.hold_signals()
        signal_name = signal.Signals(number).name
        if self.agent is None or not self.agent.num_started:
            self.say(f"{signal_name}: the job has not started, and nothing was saved")
            return 128 + number
        exit_codes = [process_end.code for process_end in self.agent.ended_processes()]
        exit_code, end_words = end_after_signal(
            number, exit_codes if len(exit_codes) == self.agent.num_started else []
        )
        self.say(f"{signal_name}: all processes of this machine {end_words}")
        return exit_code

    def agree_on_code(self, code: int) -> int:
        """Return the exit code on which the machines agree; later signals no longer change it."""
        if self.plan.meeting is None or self.plan.meeting.alone:
            return code
        self.guard.settle_exit(code)
        peers = self.handler.peers if self.handler is not None else None
        code = agreed_exit_code(
            peers, code, saving_s=self.plan.supervision.stop_grace_s
        )
        self.guard.settle_exit(code)
        return code

    def process_groups(self) -> Collection[int]:
        """Return the process groups that may still be alive."""
        if self.supervisor is not None:
            return self.supervisor.groups
        return ()


def run_agent(plan: LaunchPlan, report: Report, say: Say) -> int:
    """Run the plan's processes on this machine and return the exit code of the job, agreed with the other machines.

    The processes inherit this process's environment, so the plan's variables must be set in it.
    """
    meeting = plan.meeting
    supervision = plan.supervision
    assert meeting is not None, "a torchrun plan has a meeting"
    _quieten_torch(supervision)
    check_in = CheckIn(
        with_address(report, meeting), supervision, say, meeting.join_timeout_s
    )
    with tempfile.TemporaryDirectory(prefix="hasten-launch-") as scratch:
        signal_guard = SignalGuard(
            lambda: job_run.process_groups(),
            grace_s=SHUTDOWN_S + 5,
            saving_grace_s=supervision.stop_grace_s + 5,
            last_words=say,
        )
        job_run = _Run(plan, check_in, say, signal_guard)
        with signal_guard:
            try:
                exit_code = job_run.agree_on_code(job_run.run_processes(scratch))
                if job_run.handler is not None:
                    # not after a signal: the other machines of an elastic job may continue
                    job_run.handler.shutdown()
                return exit_code
            except (SignalException, Interrupted) as stop:
                return job_run.agree_on_code(
                    job_run.stop_job(
                        stop.sigval
                        if isinstance(stop, SignalException)
                        else stop.number
                    )
                )
            finally:
                kill_groups(job_run.process_groups())


def _failures_of(result: RunResult) -> list[Failure]:
    """Return the failures of this machine's ranks; torch lists ranks that died before ranks that it stopped."""
    host = socket.gethostname()
    time_s = time.time()
    failures = []
    for rank, process_failure in result.failures.items():
        failures.append(
            read_failure(
                rank,
                host,
                process_failure.exitcode,
                process_failure.pid,
                error_file=str(process_failure.error_file or ""),
                time=time_s,
            )
        )
    return [replace(failures[0], stopped=False), *failures[1:]]


def _worker_spec(plan: LaunchPlan, handler: Handler) -> WorkerSpec:
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


def _logs_specs(supervision: Supervision, scratch: str) -> DefaultLogsSpecs:
    """Return the log settings: terminal output by default; with log_dir files instead, or both; error files always."""
    writes_files = supervision.log_dir is not None
    if supervision.tee:
        tee_streams = Std.from_str(supervision.tee)
    else:
        tee_streams = Std.NONE
    log_folder = Path(supervision.log_dir or scratch)
    log_folder.mkdir(parents=True, exist_ok=True)
    redirects = Std.ALL if writes_files else Std.NONE
    return DefaultLogsSpecs(
        log_dir=str(log_folder), redirects=redirects, tee=tee_streams
    )


def _rendezvous_handler(meeting: Meeting, check_in: CheckIn) -> Handler:
    if meeting.kind == "fixed":
        return FixedRendezvous(meeting, check_in)
    return ElasticRendezvous(
        elastic_handler(meeting, check_in.report.address), check_in
    )


def _quieten_torch(supervision: Supervision) -> None:
    """Silence torch's elastic loggers, which repeat every failure that hasten already reports."""
    if supervision.debug:
        return
    for logger_name in list(logging.root.manager.loggerDict):
        if logger_name.startswith("torch.distributed.elastic"):
            logging.getLogger(logger_name).setLevel(logging.CRITICAL)
