"""Torch's elastic agent with callbacks to a supervisor: the only file that uses private methods of the agent.

`LocalElasticAgent` has no public way to find out which processes failed, to set the restart count passed to them, or to set the time
that they may take to stop. `TorchAgent` overrides the four private methods involved and calls a `Supervisor`.
`tests/unit/launch/test_elastic_contract.py` checks every private name and its behaviour for the installed torch.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final, Protocol

import torch.distributed.elastic.multiprocessing.api as processes
from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

SHUTDOWN_S: Final = 15
"""Seconds that processes may take to exit after SIGTERM when another process has failed."""


@dataclass(frozen=True, slots=True)
class End:
    """Exit status of one process."""

    rank: int
    pid: int
    code: int | None


class Supervisor(Protocol):
    """Callbacks for events of a machine's processes, and decisions about restarts and shutdown."""

    def restart_count(self) -> int:
        """Return the restart count to pass to new processes; it is part of names that all ranks share."""
        ...

    def restarts_left(self, agent_restarts: int) -> int:
        """Return the number of restarts left after a start; `own` is this agent's count."""
        ...

    def handle_start(self, pids: Collection[int]) -> None:
        """Handle the start of processes."""
        ...

    def handle_failure(self, result: RunResult, restarts_left: int) -> int:
        """Handle a failure, after the other processes were stopped, and return the number of restarts left."""
        ...

    def handle_stop(self, number: signal.Signals) -> int:
        """Handle a stop signal, and return the seconds that the processes may take to exit."""
        ...

    def is_finished(self) -> bool:
        """Handle successful completion on this machine; return whether the other machines were already waited for."""
        ...


class TorchAgent(LocalElasticAgent):
    """Torch's elastic agent that reports to a supervisor."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs: DefaultLogsSpecs,
        supervisor: Supervisor,
        some_ended: Callable[[Sequence[End]], None] = lambda ends: None,
    ) -> None:
        """`some_ended` is called repeatedly with the processes that have ended while others still run."""
        super().__init__(spec, logs, exit_barrier_timeout=60)
        self._supervisor = supervisor
        self._some_ended = some_ended

    def ended_processes(self) -> list[End]:
        """Return the exit status of ended processes of the last start. Torch stores exit codes nowhere else."""
        process_handlers = getattr(self._pcontext, "subprocess_handlers", {})
        global_ranks = {}
        for worker in self._worker_group.workers:
            global_ranks[worker.local_rank] = worker.global_rank
        finished_processes = []
        for local_rank, handler in process_handlers.items():
            code = handler.proc.poll()
            if code is not None:
                process_end = End(global_ranks[local_rank], handler.proc.pid, code)
                finished_processes.append(process_end)
        return finished_processes

    @property
    def num_started(self) -> int:
        """Number of processes in the last start."""
        return len(getattr(self._pcontext, "subprocess_handlers", {}))

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        agent_restarts = self._remaining_restarts
        self._remaining_restarts = (
            worker_group.spec.max_restarts - self._supervisor.restart_count()
        )
        with _signals_deferred():
            pids_by_rank: dict[int, int] = super()._start_workers(worker_group)
        self._remaining_restarts = self._supervisor.restarts_left(agent_restarts)
        self._supervisor.handle_start(pids_by_rank.values())
        return pids_by_rank

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        run_result: RunResult = super()._monitor_workers(worker_group)
        if run_result.is_failed():
            self._remaining_restarts = self._supervisor.handle_failure(
                run_result, self._remaining_restarts
            )
        elif process_ends := self.ended_processes():
            self._some_ended(process_ends)
        return run_result

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = SHUTDOWN_S
    ) -> None:
        is_signalled = isinstance(sys.exception(), SignalException)
        if is_signalled:
            seconds = self._supervisor.handle_stop(death_sig)
        else:
            seconds = SHUTDOWN_S
        if self._pcontext is not None:
            # torch<2.12: _shutdown() does not accept a timeout
            self._pcontext.close(death_sig, seconds)
        super()._shutdown(death_sig)

    def _exit_barrier(self) -> None:
        if not self._supervisor.is_finished():
            super()._exit_barrier()  # type: ignore[no-untyped-call]  # torch leaves it so


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer signals to the end of the block.

    Torch's handler raises. In the middle of a start it would lose the handles of running processes, which would then never be stopped.
    """
    raising_handler = processes._terminate_process_handler
    received_signals: list[int] = []

    def remember(signum: int, frame: FrameType | None) -> None:
        received_signals.append(signum)

    processes._terminate_process_handler = remember
    try:
        yield
    finally:
        processes._terminate_process_handler = raising_handler
        for number in signal.valid_signals():
            if signal.getsignal(number) is remember:
                signal.signal(number, raising_handler)
    if received_signals:
        raising_handler(received_signals[0], None)
