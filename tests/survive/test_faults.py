"""Faults on simulated hosts: a seeded sample of the kinds and phases that `make bench-survive` covers. As root, with torchft."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.machines import why_impossible
from tests.survive.checking import check_run
from tests.survive.faults import (
    FAULT_OPTIONS,
    Fault,
    FaultyNetwork,
    FaultyRun,
    faulty_network,
    lighthouse,
    run_with_faults,
)
from tests.survive.reading import rows

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        os.name != "posix" or bool(why_impossible()),
        reason="needs root and network namespaces",
    ),
]


@pytest.mark.parametrize(
    ("replicas", "faults"),
    [
        (
            2,
            [
                Fault("cut", "exchange", 5.0),
                Fault("kill", "save", 0.0),
                Fault("stop", "evaluation", 5.0),
            ],
        ),
        (
            3,
            [
                Fault("kill", "backward", 0.0),
                Fault("cut", "between epochs", 1.5, follows_s=0.5, pair=True),
                Fault("stop", "save", -1.0),
            ],
        ),
    ],
)
def test_faults_cost_neither_an_update_nor_a_sample(
    tmp_path: Path, replicas: int, faults: list[Fault]
) -> None:
    with faulty_network(tmp_path, replicas) as network:
        options, done = run_with_faults(
            tmp_path, replicas, network, faults, random.Random(5)
        )
    updates = check_run(tmp_path, options)
    assert len(done) == len(faults)
    assert _lost(tmp_path, {update["lineage"] for update in updates}) <= len(faults)


def test_a_new_process_waits_for_the_one_that_holds_the_run(tmp_path: Path) -> None:
    """The only replica with the run's state is cut off while another starts: that one must not begin a second run."""
    with faulty_network(tmp_path, 2) as network, lighthouse(network) as address:
        run = FaultyRun(tmp_path, 2, network, random.Random(1))
        options = {**FAULT_OPTIONS, "size": 202, "network": network.prefix}
        run.start(options, address)
        try:
            _cut_while_another_starts(run, network)
            options["epochs"] = run.finish(200.0)
        finally:
            run.close()
    updates = check_run(tmp_path, options)
    assert _lost(tmp_path, {update["lineage"] for update in updates}) <= 1
    assert "replica 1 waits: ['0'] hold the run" in (tmp_path / "out.txt").read_text()


def _cut_while_another_starts(run: FaultyRun, network: FaultyNetwork) -> None:
    pids = run.wait_for(2)
    os.kill(pids["1"], signal.SIGKILL)
    network.made[0].unplug()
    until = time.monotonic() + 60.0
    while (
        "hold the run" not in (run.folder / "out.txt").read_text()
        and time.monotonic() < until
    ):
        time.sleep(0.05)
    network.made[0].plug()


def _lost(folder: Path, history: set[str]) -> int:
    """Return the number of updates that were applied by some replica, and are not part of the run's history."""
    return len({row["lineage"] for row in rows(folder) if row["applied"]} - history)
