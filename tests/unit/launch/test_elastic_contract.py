"""What `TorchAgent` relies on in torch's elastic agent, checked with real processes for the torch that is installed.

A new torch is supported when this file passes under it: it needs nothing but torch and hasten.
"""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import pytest
import torch.distributed.elastic.multiprocessing.api as processes
from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

from hasten.launch.base import Meeting, Supervision
from hasten.launch.checkin import Report
from hasten.launch.elastic.rendezvous import CheckIn, FixedRendezvous
from hasten.launch.elastic.torch_agent import SHUTDOWN_S, End, TorchAgent

OVERRIDDEN: Final = {
    "_start_workers": ["self", "worker_group"],
    "_monitor_workers": ["self", "worker_group"],
    "_shutdown": ["self", "death_sig"],
    "_exit_barrier": ["self"],
}
OPTIONAL: Final = ("timeout",)
"""Arguments of newer versions that TorchAgent takes and does without."""
HANDLER: Final = "_terminate_process_handler"
ATTRIBUTES: Final = ("_remaining_restarts", "_pcontext", "_worker_group")


class Recorder:
    """A supervisor that writes down what it is told and answers with fixed numbers."""

    def __init__(self, counts: list[int], left: list[int]) -> None:
        self.counts, self.left = counts, left
        self.pids: list[int] = []
        self.failures: list[tuple[dict[int, int], int]] = []
        self.stopped: list[signal.Signals] = []
        self.num_finished = 0

    def restart_count(self) -> int:
        return self.counts.pop(0)

    def restarts_left(self, agent_restarts: int) -> int:
        return agent_restarts

    def handle_start(self, pids: Collection[int]) -> None:
        self.pids += pids

    def handle_failure(self, result: RunResult, restarts_left: int) -> int:
        self.failures.append(
            ({rank: f.exitcode for rank, f in result.failures.items()}, restarts_left)
        )
        return self.left.pop(0)

    def handle_stop(self, number: signal.Signals) -> int:
        self.stopped.append(number)
        return 20

    def is_finished(self) -> bool:
        self.num_finished += 1
        return True


@pytest.fixture(scope="module", autouse=True)
def native_leftovers() -> None:
    """The first store of a process makes a pipe that its native library keeps forever: let it be made before we look."""
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Torch's agent takes signals over and does not give them back."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    initial_handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in initial_handlers.items():
        signal.signal(number, handler)


def made_agent(
    folder: Path, script: str, recorder: Recorder, *, count: int = 2, restarts: int = 0
) -> TorchAgent:
    """An agent that runs a shell script in `count` processes."""
    check_in = CheckIn(
        Report("here", "127.0.0.1", count),
        Supervision(quiet=True),
        lambda words: None,
        10.0,
    )
    spec = WorkerSpec(
        role="default",
        local_world_size=count,
        entrypoint="/bin/sh",
        args=("-c", script),
        rdzv_handler=FixedRendezvous(Meeting(machine_rank=0), check_in),
        max_restarts=restarts,
        monitor_interval=0.05,
    )
    return TorchAgent(spec, DefaultLogsSpecs(log_dir=str(folder)), recorder)


def test_the_private_names_are_there_with_the_arguments_we_know() -> None:
    for name, arguments in OVERRIDDEN.items():
        parameter_names = [
            p
            for p in inspect.signature(getattr(LocalElasticAgent, name)).parameters
            if p not in OPTIONAL
        ]
        assert parameter_names == arguments, (
            f"{name}{parameter_names}: torch has changed it; adapt hasten/launch/elastic/torch_agent.py"
        )
        assert name in vars(TorchAgent), (
            f"{name} is no longer overridden; remove it here"
        )
    assert (
        inspect.signature(LocalElasticAgent._shutdown).parameters["death_sig"].default
        == signal.SIGTERM
    )


def test_the_attributes_are_there(tmp_path: Path) -> None:
    agent = made_agent(tmp_path, "true", Recorder([0], []), restarts=3)
    assert [name for name in ATTRIBUTES if not hasattr(agent, name)] == []
    assert agent._remaining_restarts == 3
    assert list(inspect.signature(getattr(processes, HANDLER)).parameters) == [
        "signum",
        "frame",
    ]
    assert agent.ended_processes() == []


def test_processes_get_the_supervisors_restart_count_and_as_many_restarts_as_it_allows(
    tmp_path: Path,
) -> None:
    recorder = Recorder([0, 7, 8], [2, 1, 0])
    script = f"echo $TORCHELASTIC_RESTART_COUNT >> {tmp_path}/counts; exit 3"
    result = made_agent(tmp_path, script, recorder, count=1, restarts=2).run()
    assert result.is_failed()
    assert (tmp_path / "counts").read_text().split() == ["0", "7", "8"]
    assert [codes for codes, _ in recorder.failures] == [{0: 3}] * 3
    assert len(recorder.pids) == 3
    assert recorder.num_finished == 0


def test_a_failure_can_end_the_restarts(tmp_path: Path) -> None:
    recorder = Recorder([0], [0])
    result = made_agent(tmp_path, "exit 85", recorder, restarts=5).run()
    assert result.is_failed()
    assert recorder.failures[0][1] == 5


def test_exit_codes_are_known_by_rank(tmp_path: Path) -> None:
    recorder = Recorder([0], [0])
    agent = made_agent(tmp_path, "sleep $LOCAL_RANK; exit $LOCAL_RANK", recorder)
    agent.run()
    assert agent.ended_processes() == [
        End(0, recorder.pids[0], 0),
        End(1, recorder.pids[1], 1),
    ]
    assert agent.num_started == 2


def test_the_exit_barrier_is_ours(tmp_path: Path) -> None:
    recorder = Recorder([0], [])
    assert not made_agent(tmp_path, "true", recorder).run().is_failed()
    assert recorder.num_finished == 1


def test_a_signal_gives_the_processes_the_time_the_supervisor_says(
    tmp_path: Path,
) -> None:
    recorder = Recorder([0], [])
    script = f"trap 'sleep 0.5; exit 85' TERM; touch {tmp_path}/ready-$LOCAL_RANK; for i in $(seq 600); do sleep 0.1; done"
    agent = made_agent(tmp_path, script, recorder)

    def stop() -> None:
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(SignalException) as caught:
        agent.run()
    thread.join()
    assert caught.value.sigval == signal.SIGTERM
    assert recorder.stopped == [signal.SIGTERM]
    assert [end.code for end in agent.ended_processes()] == [85, 85]
    assert SHUTDOWN_S < 20


def test_a_signal_during_the_start_stops_every_process(tmp_path: Path) -> None:
    recorder = Recorder([0], [])
    script = "[ $LOCAL_RANK = 0 ] && kill -TERM $PPID; exec sleep 60"
    agent = made_agent(tmp_path, script, recorder, count=8)
    with pytest.raises(SignalException) as caught:
        agent.run()
    assert caught.value.sigval == signal.SIGTERM
    assert recorder.stopped == [signal.SIGTERM]
    assert [end.code for end in agent.ended_processes()] == [-signal.SIGTERM] * 8
