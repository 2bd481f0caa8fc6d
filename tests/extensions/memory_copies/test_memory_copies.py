"""A machine is killed at a random update: the run goes on from the memory of the other one, to the same bits as without the kill."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.machines import (
    NamespaceMachine,
    Zygote,
    machines,
    meet,
    warm_launcher,
    why_impossible,
)

pytestmark = [pytest.mark.slow, pytest.mark.timed]

COPY_TESTS: Final = Path(__file__).parent
SUPPORT: Final = Path(__file__).parents[2] / "support"
SCRIPT: Final = COPY_TESTS / "memory_copies_train.py"
RETURN_S: Final = 10.0


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    if reason := why_impossible():
        pytest.skip(reason)
    with warm_launcher(
        SUPPORT / "launch_zygote.py", tmp_path_factory.mktemp("home")
    ) as process:
        yield process


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket of a process that forks ranks."""
    path = str(tmp_path_factory.mktemp("warm") / "socket")
    words = [sys.executable, str(SUPPORT / "rank_zygote.py"), "serve", path]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield path
        server.kill()


class Job:
    """A training on two machines."""

    def __init__(
        self,
        hosts: list[NamespaceMachine],
        warm: str,
        folder: Path,
        strategy: str,
        updates: int,
        every: int,
    ) -> None:
        self.hosts = hosts
        self._folder = folder
        self._every = every or None
        rank = [
            sys.executable,
            "-S",
            str(SUPPORT / "rank_zygote.py"),
            "rank",
            warm,
            str(SCRIPT),
        ]
        self._words = [
            "--max_restarts=99",
            "--no_python",
            "--",
            *rank,
            strategy,
            str(updates),
            str(every),
        ]
        for number in range(2):
            (folder / f"updates-{number}").unlink(missing_ok=True)
            self.start(number)

    def start(self, number: int) -> float:
        started_at = time.time()
        words = [
            *meet(2),
            f"--machine_rank={number}",
            "--processes_per_machine=1",
            *self._words,
        ]
        self.hosts[number].start(self._folder, words)
        return started_at

    def lines(self, kind: str, since: float = 0.0) -> list[list[tuple[int, float]]]:
        """What each rank has written of this kind."""
        rank_rows = []
        for rank in range(2):
            path = self._folder / f"updates-{rank}"
            rows = (
                [line.split() for line in path.read_text().splitlines()]
                if path.exists()
                else []
            )
            rank_rows.append(
                [
                    (int(r[1]), float(r[2]))
                    for r in rows
                    if len(r) == 3 and r[0] == kind and float(r[2]) > since
                ]
            )
        return rank_rows

    def step(self) -> int:
        return max((step for rows in self.lines("step") for step, _ in rows), default=0)

    def wait(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "\n".join(
                host.said for host in self.hosts
            )
            time.sleep(0.02)

    def end(self) -> tuple[str, ...]:
        """What the ranks held at the end; under FSDP the whole weights are on rank 0 alone."""
        exits = [host.end() for host in self.hosts]
        assert [code for code, _ in exits] == [0, 0], exits
        return tuple(
            (self._folder / f"end-{rank}-{self._every}").read_text()
            for rank in range(2)
        )

    def lose(self, number: int) -> tuple[int, float]:
        """Kill a machine and bring it back: updates that were lost, and seconds from its return to the next update."""
        self.hosts[number].kill()
        killed_step = self.step()
        returned_at = self.start(number)
        self.wait(lambda: all(self.lines("step", returned_at)))
        resumed = {rows[0][0] for rows in self.lines("resumed", returned_at)}
        assert len(resumed) == 1
        return killed_step - resumed.pop(), max(
            rows[0][1] for rows in self.lines("step", returned_at)
        ) - returned_at


def lose_machines(
    zygote: Zygote,
    warm: str,
    folder: Path,
    strategy: str,
    victims: list[int],
    seed: int,
) -> None:
    chance = random.Random(seed)
    updates = 8 * (len(victims) + 1)
    with machines(zygote, 2) as hosts:
        expected_end = Job(hosts, warm, folder, strategy, updates, every=0).end()
        job = Job(hosts, warm, folder, strategy, updates, every=1)
        for kill, victim in enumerate(victims):
            target = 8 * kill + chance.randint(1, 7)
            job.wait(lambda target=target: job.step() >= target)  # type: ignore[misc]
            # in the update, in the copy, or between them
            time.sleep(0.1 * chance.random())
            lost, took = job.lose(victim)
            assert lost <= 1, f"{lost} updates were lost"
            assert took < RETURN_S, f"{took:.1f} s"
        assert job.end() == expected_end


def test_a_lost_machine_costs_one_update_whichever_it_is(
    zygote: Zygote, warm: str, tmp_path: Path
) -> None:
    lose_machines(zygote, warm, tmp_path, "ddp", [1, 0], seed=0)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_twenty_lost_machines(
    zygote: Zygote, warm: str, tmp_path: Path, strategy: str
) -> None:
    chance = random.Random(strategy)
    lose_machines(
        zygote,
        warm,
        tmp_path,
        strategy,
        [chance.randrange(2) for _ in range(20)],
        seed=1,
    )
