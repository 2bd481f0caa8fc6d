"""Replicas of several processes, by DDP and by FSDP2: one that loses a rank is lost as a whole, and the others continue."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.survive.checking import check_run
from tests.survive.driving import finish, options_of, start, wait_for
from tests.survive.group_faults import Fault, end, happened
from tests.survive.reading import results

# processes that load torch, some of them again and again
pytestmark = pytest.mark.timeout(3000)
LIMIT_S = 600.0
DDP = {"strategy": "ddp", "ranks": 2}
# the norm of shards is summed in another order
FSDP = {"strategy": "fsdp", "ranks": 2, "clip": False}


@pytest.mark.parametrize(
    "chosen_options",
    [
        {**DDP, "size": 227, "every": 2},  # windows of two batches, a short last one
        # the last update has one sample: three ranks have none
        {**DDP, "size": 97, "weighted": True, "workers": 1},
        {**FSDP, "size": 227},
        {**FSDP, "size": 131, "clip": True, "every": 2},
        # the last update has five samples for six ranks
        {**DDP, "ranks": 3, "size": 101},
        # of some parameters the shards differ in size
        {**FSDP, "ranks": 3, "size": 101},
    ],
)
def test_without_a_loss_the_run_equals_one_process(
    tmp_path: Path, chosen_options: dict[str, Any]
) -> None:
    options = options_of(chosen_options)
    finish(start(tmp_path, 2, options), tmp_path, LIMIT_S)
    exact = not options["weighted"] and not (
        chosen_options["strategy"] == "fsdp" and options["clip"]
    )
    exact = exact and options["ranks"] == 2  # gloo sums three ranks in another order
    updates = check_run(tmp_path, options, tolerance=0.0 if exact else 1e-6)
    assert {len(update["contributors"]) for update in updates} == {2}
    assert sorted(results(tmp_path)) == [
        f"{name}.{rank}" for name in "01" for rank in range(options["ranks"])
    ]
    assert sorted(
        name
        for name, replica_outcome in results(tmp_path).items()
        if replica_outcome["leads"]
    ) == ["0.0"]


@pytest.mark.parametrize("chosen_options", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_a_killed_rank_ends_its_replica_alone(
    tmp_path: Path, chosen_options: dict[str, Any]
) -> None:
    faults: list[Fault] = [
        ("0", 1, "forward", "SIGKILL"),
        ("1", 0, "backward", "SIGKILL"),
        ("1", 1, "exchange", "SIGKILL"),
        ("0", 0, "write", "SIGKILL"),
        ("0", 1, "step", "SIGKILL"),
    ]
    options = options_of(
        {
            **chosen_options,
            "size": 800,
            "epochs": None,
            "sleep": 0.05,
            "faults": faults,
            "replicas": 2,
        }
    )
    run = start(tmp_path, 2, options)
    options["epochs"] = end(run, tmp_path, len(faults), 2, LIMIT_S)
    text = finish(run, tmp_path, LIMIT_S)
    updates = check_run(tmp_path, options)
    assert sorted(happened(tmp_path)) == list(range(len(faults)))
    assert (
        "rank 1 of replica 0 ended with killed by SIGKILL; the replica is started again, 1 continue"
        in text
    )
    counts = Counter(
        path.stem.split("-")[1] for path in tmp_path.glob("replica-*.jsonl")
    )
    # processes of each rank: one at the start, and one after each fault of its replica
    of_replica = {"0": 4, "1": 3}
    assert counts == {
        f"{name}.{rank}": number
        for name, number in of_replica.items()
        for rank in range(2)
    }
    assert {len(update["contributors"]) for update in updates} == {1, 2}
    assert len(results(tmp_path)) == 4


@pytest.mark.parametrize("chosen_options", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_a_killed_rank_of_three_ends_its_replica_alone(
    tmp_path: Path, chosen_options: dict[str, Any]
) -> None:
    faults: list[Fault] = [
        ("1", 2, "backward", "SIGKILL"),
        ("0", 1, "exchange", "SIGKILL"),
    ]
    chosen_options = {
        **chosen_options,
        "ranks": 3,
        "size": 800,
        "epochs": None,
        "sleep": 0.05,
        "faults": faults,
        "replicas": 2,
    }
    options = options_of(chosen_options)
    run = start(tmp_path, 2, options)
    options["epochs"] = end(run, tmp_path, len(faults), 2, LIMIT_S)
    text = finish(run, tmp_path, LIMIT_S)
    # gloo sums three ranks in another order, in every update
    updates = check_run(tmp_path, options, tolerance=1e-5)
    assert sorted(happened(tmp_path)) == [0, 1]
    assert (
        "rank 2 of replica 1 ended with killed by SIGKILL; the replica is started again, 1 continue"
        in text
    )
    counts = Counter(
        path.stem.split("-")[1] for path in tmp_path.glob("replica-*.jsonl")
    )
    assert counts == {f"{name}.{rank}": 2 for name in "01" for rank in range(3)}
    assert {len(update["contributors"]) for update in updates} == {1, 2}
    assert len(results(tmp_path)) == 6


@pytest.mark.parametrize("chosen_options", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_a_stopped_rank_makes_its_replica_count_as_lost(
    tmp_path: Path, chosen_options: dict[str, Any]
) -> None:
    faults: list[Fault] = [
        ("1", 1, "forward", "SIGSTOP"),
        ("0", 0, "exchange", "SIGSTOP"),
    ]
    options = options_of(
        {
            **chosen_options,
            "size": 800,
            "epochs": None,
            "sleep": 0.05,
            "faults": faults,
            "replicas": 2,
        }
    )
    run = start(tmp_path, 2, options)
    for number in range(len(faults)):
        until = time.monotonic() + LIMIT_S
        while (
            number not in happened(tmp_path)
            and time.monotonic() < until
            and run.poll() is None
        ):
            time.sleep(0.05)
        time.sleep(8.0)
        os.kill(happened(tmp_path)[number], signal.SIGCONT)
    options["epochs"] = end(run, tmp_path, len(faults), 2, LIMIT_S)
    finish(run, tmp_path, LIMIT_S)
    updates = check_run(tmp_path, options)
    numbers = [len(update["contributors"]) for update in updates]
    assert 1 in numbers
    # no process was started again
    assert len(list(tmp_path.glob("replica-*.jsonl"))) == 4
    healed = {
        name: replica_outcome["healed"][1:]
        if name[0] == "1"
        else replica_outcome["healed"]
        for name, replica_outcome in results(tmp_path).items()
    }
    # the first healing of replica 1 was at the start
    assert all(healed.values()), healed
    assert numbers[-1] == 2


def test_a_wait_for_other_replicas_is_no_stall_of_the_ranks(tmp_path: Path) -> None:
    """The watchdog of a replica's ranks, which ends a job that makes no progress, does not count it."""
    options = options_of({**DDP, "size": 400, "epochs": 2, "sleep": 0.03})
    run = start(
        tmp_path, 2, options, "--min_replicas", "2", "--trust_stall_after_s", "3"
    )
    pids = wait_for(run, tmp_path, 4)
    stopped = [pids["1.0"], pids["1.1"]]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(20.0)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    text = finish(run, tmp_path, LIMIT_S)
    check_run(tmp_path, options)
    assert "replica 0 waits for the others since" in text
    # no process was started again
    assert len(list(tmp_path.glob("replica-*.jsonl"))) == 4
    assert not list(tmp_path.glob("**/stalls/*"))
