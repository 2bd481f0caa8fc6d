"""Launchers on two simulated hosts: a lost machine costs what a lost replica costs, and returns. As root, with torchft."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.machines import NamespaceHost, hosts, why_impossible
from tests.survive.checking import check_run
from tests.survive.driving import SURVIVE_TESTS, close, options_of, recent, search_path
from tests.survive.faults import rank_command, warm_ranks
from tests.survive.test_preemption import PREEMPTED, left

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        os.name != "posix" or bool(why_impossible()),
        reason="needs root and network namespaces",
    ),
]
LIMIT_S = 300.0
Launcher = subprocess.Popen[bytes]


class Job:
    """A run of four replicas on two hosts, each with its launcher."""

    def __init__(
        self, folder: Path, network_hosts: list[NamespaceHost], options: dict[str, Any]
    ) -> None:
        self.folder, self.hosts, self.options = folder, network_hosts, options

    def start(self, rank: int, *flags: str) -> Launcher:
        """Start the launcher of a host."""
        command = [
            "ip",
            "netns",
            "exec",
            self.hosts[rank].namespace,
            sys.executable,
            "-m",
            "hasten",
            "launch",
            "--cpu",
        ]
        command += [
            "--replicas",
            "4",
            "--num_machines",
            "2",
            "--machine_rank",
            str(rank),
        ]
        command += [
            "--main_process_ip",
            self.hosts[0].address,
            "--main_process_port",
            "29517",
            *flags,
        ]
        command += rank_command(self.folder / "socket")
        command += [
            str(SURVIVE_TESTS / "replica_program.py"),
            str(self.folder),
            json.dumps(self.options),
        ]
        variables = {
            **os.environ,
            "PYTHONPATH": search_path(),
            "HASTEN_TOKEN": "0123456789abcdef" * 2,
        }
        with (self.folder / f"out-{rank}.txt").open("a") as out:
            return subprocess.Popen(
                command, stdout=out, stderr=out, env=variables, start_new_session=True
            )

    def said(self, rank: int) -> str:
        """Return the output of a host."""
        return (self.folder / f"out-{rank}.txt").read_text()

    def wait_for(self, names: str, since: float = 0.0) -> None:
        """Wait until these replicas have made an update after this time, and train now."""
        until = time.monotonic() + LIMIT_S
        while not set(names) <= set(recent(self.folder, min(5.0, time.time() - since))):
            assert time.monotonic() < until, self.said(0)[-4000:] + self.said(1)[-4000:]
            time.sleep(0.02)

    def end(self, launchers: list[Launcher], code: int = 0) -> None:
        """Wait until the launchers have ended with this code."""
        for launcher in launchers:
            exit_code = launcher.wait(LIMIT_S)
            assert exit_code == code, (
                f"{exit_code}\n{self.said(0)[-4000:]}\n--\n{self.said(1)[-4000:]}"
            )


@contextmanager
def job(folder: Path, **chosen_options: Any) -> Iterator[Job]:
    """Context manager with two hosts, and with processes in which torch is loaded."""
    with (
        hosts(2) as network_hosts,
        warm_ranks(folder / "socket", ["torchft.coordination"]),
    ):
        yield Job(folder, network_hosts, options_of(chosen_options))


def test_a_killed_machine_is_lost_and_returns(tmp_path: Path) -> None:
    with job(tmp_path, size=202, open=True, sleep=0.04) as run:
        first, second = run.start(0), run.start(1)
        run.wait_for("0123")
        run.hosts[1].kill()  # launcher and replicas
        second.wait(20)
        run.wait_for("01", time.time() + 1.0)
        restarted = run.start(1)
        run.wait_for("0123", time.time())
        run.options["epochs"] = close(tmp_path)
        run.end([first, restarted])
    updates = check_run(tmp_path, run.options)
    members = [tuple(update["contributors"]) for update in updates]
    assert ("0", "1", "2", "3") in members
    assert ("0", "1") in members
    assert members[-1] == ("0", "1", "2", "3")
    # it has never left its process
    assert len(list(tmp_path.glob("replica-0-*.jsonl"))) == 1
    assert "machine 1" in run.said(0)
    assert "is back" in run.said(0)


@pytest.mark.parametrize("seconds", [4.0, 20.0])
def test_a_machine_whose_link_was_cut_is_healed(tmp_path: Path, seconds: float) -> None:
    """After the longer time its replicas have ended, because they did not reach the lighthouse, and are started again."""
    with job(tmp_path, size=202, open=True, sleep=0.04) as run:
        launchers = [run.start(0), run.start(1)]
        run.wait_for("0123")
        run.hosts[1].unplug()
        time.sleep(seconds)
        run.wait_for("01", time.time())
        run.hosts[1].plug()
        run.wait_for("0123", time.time())
        run.options["epochs"] = close(tmp_path)
        run.end(launchers)
    updates = check_run(tmp_path, run.options)
    members = [tuple(update["contributors"]) for update in updates]
    assert ("0", "1") in members
    assert members[-1] == ("0", "1", "2", "3")
    # it has never left its process
    assert len(list(tmp_path.glob("replica-0-*.jsonl"))) == 1


def test_a_signal_to_machine_0_saves_the_run_on_all_machines(tmp_path: Path) -> None:
    with job(tmp_path, size=202, open=True, sleep=0.03, preemptible=True) as run:
        launchers = [
            run.start(0, "--min_replicas", "4"),
            run.start(1, "--min_replicas", "4"),
        ]
        run.wait_for("0123")
        launchers[0].send_signal(signal.SIGTERM)
        run.end(launchers, PREEMPTED)
        left_replicas = left(tmp_path)
        assert len(left_replicas) == 4
        assert len({step for step, _ in left_replicas}) == 1
        assert sum(bool(checkpoint_path) for _, checkpoint_path in left_replicas) == 1
        run.options["epochs"] = close(tmp_path)
        run.end([run.start(0), run.start(1)])
    check_run(tmp_path, run.options)


def test_a_signal_to_another_machine_lets_its_replicas_leave(tmp_path: Path) -> None:
    with job(tmp_path, size=202, open=True, sleep=0.03, preemptible=True) as run:
        first, second = run.start(0), run.start(1)
        run.wait_for("0123")
        second.send_signal(signal.SIGTERM)
        run.end([second], PREEMPTED)
        run.wait_for("01", time.time())
        run.options["epochs"] = close(tmp_path)
        run.end([first])
    members = [
        tuple(update["contributors"]) for update in check_run(tmp_path, run.options)
    ]
    assert members[-1] == ("0", "1")


def test_without_machine_0_the_others_end(tmp_path: Path) -> None:
    with job(tmp_path, size=202, open=True, sleep=0.03) as run:
        first, second = run.start(0), run.start(1, "--rdzv_conf", "join_timeout=40")
        run.wait_for("0123")
        run.hosts[0].kill()
        first.wait(20)
        run.end([second], 1)
        assert "machine 0 does not respond" in run.said(1)
        assert not run.hosts[1].processes
