"""Runs whose replicas are killed and stopped: no run ends, each sample is used once, and the weights are those of the same updates."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.survive.checking import check_run
from tests.survive.driving import (
    SURVIVE_TESTS,
    close,
    disturb,
    finish,
    options_of,
    recent,
    start,
    wait_for,
)
from tests.survive.reading import results

# processes that load torch, some of them again and again
pytestmark = pytest.mark.timeout(3000)
LIMIT_S = 400.0


@pytest.mark.parametrize(
    ("replicas", "chosen_options"),
    [
        (2, {"size": 231, "every": 2}),  # windows of two batches, a short last one
        (3, {"size": 122}),  # a last update in which a replica has no samples
        (2, {"size": 90, "workers": 2}),  # batches that are read ahead
    ],
)
def test_without_a_loss_the_run_equals_one_process(
    tmp_path: Path, replicas: int, chosen_options: dict[str, Any]
) -> None:
    options = options_of(chosen_options)
    finish(start(tmp_path, replicas, options), tmp_path, LIMIT_S)
    updates = check_run(tmp_path, options)
    assert {len(update["contributors"]) for update in updates} == {replicas}
    assert len(results(tmp_path)) == replicas
    assert (
        sum(replica_outcome["leads"] for replica_outcome in results(tmp_path).values())
        == 1
    )


def test_a_killed_replica_costs_neither_an_update_nor_a_sample(tmp_path: Path) -> None:
    options = options_of({"size": 600, "sleep": 0.03})
    run = start(tmp_path, 3, options)
    pids = wait_for(run, tmp_path, 3)
    os.kill(pids["1"], signal.SIGKILL)
    text = finish(run, tmp_path, LIMIT_S)
    updates = check_run(tmp_path, options)
    assert "without 1; 4 samples are given out again" in text
    assert (
        "rank 0 of replica 1 ended with killed by SIGKILL; the replica is started again, 2 continue"
        in text
    )
    numbers = [len(update["contributors"]) for update in updates]
    assert numbers[0] == 3
    assert 2 in numbers
    survivor = results(tmp_path)["0"]
    assert survivor["healed"] == []  # it has never left its process, nor its history
    assert survivor["lost"][0][1] == "1"


def test_a_returning_replica_is_healed_and_takes_part_again(tmp_path: Path) -> None:
    options = options_of({"size": 4000, "epochs": 1, "sleep": 0.04})
    run = start(tmp_path, 2, options)
    pids = wait_for(run, tmp_path, 2)
    os.kill(pids["0"], signal.SIGKILL)  # the one that leads
    finish(run, tmp_path, LIMIT_S)
    updates = check_run(tmp_path, options)
    numbers = [len(update["contributors"]) for update in updates]
    assert numbers[0] == numbers[-1] == 2
    assert results(tmp_path)["0"]["healed"]
    assert [name for _, name in results(tmp_path)["1"]["joined"]] == ["0"]


@pytest.mark.parametrize("seconds", [0.3, 6.0])
def test_a_stopped_replica_is_left_behind_and_healed_when_it_wakes(
    tmp_path: Path, seconds: float
) -> None:
    options = options_of({"size": 2400, "epochs": 1, "sleep": 0.04})
    run = start(tmp_path, 3, options, "--survive_timeout_s", "2")
    pids = wait_for(run, tmp_path, 3)
    stopped_at = time.time()
    os.kill(pids["2"], signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pids["2"], signal.SIGCONT)
    finish(run, tmp_path, LIMIT_S)
    updates = check_run(tmp_path, options)
    numbers = [
        len(update["contributors"]) for update in updates if update["time"] > stopped_at
    ]
    assert numbers[-1] == 3
    assert (2 in numbers) == (seconds > 4)
    # the first was at the start
    assert bool(results(tmp_path)["2"]["healed"][1:]) == (seconds > 4)


def test_a_replica_whose_loop_hangs_is_left_out_though_it_sends_heartbeats(
    tmp_path: Path,
) -> None:
    options = options_of({"size": 202, "open": True, "sleep": 0.04})
    run = start(tmp_path, 3, options, "--survive_timeout_s", "2")
    wait_for(run, tmp_path, 3)
    hung_at = time.time()
    (tmp_path / "hang-2").write_text("12")
    for trains in (False, True):  # it hangs, then it trains again
        while ("2" in recent(tmp_path, 4.0)) != trains:
            assert run.poll() is None
            time.sleep(0.02)
    options["epochs"] = close(tmp_path)
    finish(run, tmp_path, LIMIT_S)
    updates = [
        update for update in check_run(tmp_path, options) if update["time"] > hung_at
    ]
    without = [update for update in updates if update["contributors"] == ["0", "1"]]
    assert len(without) > 20  # made while it hung
    assert len(updates[-1]["contributors"]) == 3
    assert results(tmp_path)["2"]["healed"][1:]  # the first was at the start
    # no process was started again
    assert len(list(tmp_path.glob("replica-*.jsonl"))) == 3


def test_a_wait_below_the_minimum_is_told(tmp_path: Path) -> None:
    options = options_of({"size": 400, "epochs": 1, "sleep": 0.03})
    run = start(tmp_path, 2, options, "--min_replicas", "2")
    pids = wait_for(run, tmp_path, 2)
    os.kill(pids["1"], signal.SIGSTOP)
    time.sleep(11.0)
    assert "0" not in recent(tmp_path, 3.0)  # it makes no update alone
    os.kill(pids["1"], signal.SIGCONT)
    text = finish(run, tmp_path, LIMIT_S)
    assert re.search(
        r"replica 0 waits for the others since \d+ s: fewer than min_replicas=2 are there",
        text,
    )
    updates = check_run(tmp_path, options)
    assert len(updates[-1]["contributors"]) == 2


def test_below_the_minimum_the_run_waits(tmp_path: Path) -> None:
    options = options_of({"size": 400, "epochs": 1, "sleep": 0.03})
    run = start(tmp_path, 2, options, "--min_replicas", "2")
    pids = wait_for(run, tmp_path, 2)
    os.kill(pids["1"], signal.SIGKILL)
    finish(run, tmp_path, LIMIT_S)
    updates = check_run(tmp_path, options)
    numbers = [len(update["contributors"]) for update in updates]
    # the interrupted update; its members are counted with the returned replica
    assert numbers.count(1) == 1
    assert numbers[-1] == 2


def test_replicas_lost_at_random_instants(tmp_path: Path) -> None:
    number = 40 if "HASTEN_LONG_TESTS" in os.environ else 5
    options = options_of({"size": 600 * number, "epochs": 2, "sleep": 0.03})
    run = start(tmp_path, 3, options, "--survive_timeout_s", "2")
    done = disturb(run, tmp_path, number, 3, random.Random(3))
    finish(run, tmp_path, LIMIT_S)
    check_run(tmp_path, options)
    assert done.kills


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "auto"), (2, "ddp"), (2, "fsdp")])
def test_a_checkpoint_in_the_middle_of_an_epoch_keeps_the_account(
    tmp_path: Path, ranks: int, strategy: str
) -> None:
    program = [str(SURVIVE_TESTS / "resuming_program.py"), str(tmp_path)]
    command = [
        sys.executable,
        "-m",
        "hasten",
        "launch",
        "--cpu",
        "--replicas",
        "2",
        "--strategy",
        strategy,
    ]
    command += ["--num_processes", str(2 * ranks), *program]
    for stop in ("6", "0"):  # six updates of two replicas, then the rest
        subprocess.run(
            [*command, stop],
            check=True,
            timeout=LIMIT_S,
            env={**os.environ, "PYTHONPATH": _path()},
        )
    written = [json.loads(path.read_text()) for path in tmp_path.glob("*-*.json")]
    assert len(written) == 4 * ranks
    used_indices = Counter(
        index for process_record in written for index in process_record["seen"]
    )
    assert used_indices == dict.fromkeys(range(120), 2)  # two epochs
    final_weights = [
        json.loads(path.read_text())["weights"]
        for path in tmp_path.glob("second-*.json")
    ]
    assert len(final_weights) == 2 * ranks
    assert all(weights == final_weights[0] for weights in final_weights)


def _path() -> str:
    """Return the module search path of this process for a child that imports tests."""
    return os.pathsep.join([str(SURVIVE_TESTS.parents[1]), *filter(None, sys.path)])


def test_a_replica_that_wakes_after_the_end_does_not_continue_the_run(
    tmp_path: Path,
) -> None:
    options = options_of({"size": 300, "epochs": 1, "sleep": 0.03})
    run = start(
        tmp_path,
        3,
        options,
        "--survive_timeout_s",
        "2",
        "--survive_hang_timeout_s",
        "40",
    )
    pids = wait_for(run, tmp_path, 3)
    os.kill(pids["1"], signal.SIGSTOP)
    until = time.monotonic() + LIMIT_S
    while len(results(tmp_path)) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(4.0)  # the others have left, and their heartbeats are forgotten
    os.kill(pids["1"], signal.SIGCONT)
    finish(run, tmp_path, LIMIT_S)
    check_run(tmp_path, options)
    assert sorted(results(tmp_path)) == ["0", "2"]


def test_calls_that_are_refused_say_what_to_do(tmp_path: Path) -> None:
    program, out = str(SURVIVE_TESTS / "refused_program.py"), tmp_path / "found.json"
    command = [
        sys.executable,
        "-m",
        "hasten",
        "launch",
        "--cpu",
        "--replicas",
        "1",
        program,
        str(out),
    ]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    messages = json.loads(out.read_text())
    assert (
        "Iterate over the loader that prepare() returned"
        in messages["skip_first_batches"]
    )
    assert "2 optimizers were prepared" in messages["optimizers"]
    assert "groups of one optimizer" in messages["optimizers"]
