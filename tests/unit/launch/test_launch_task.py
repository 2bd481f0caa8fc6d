"""Ranks that a cluster started, meeting at one store: two that both take themselves for rank 0 must find each other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from hasten.launch import network
from hasten.launch.cluster import task
from hasten.runtime.store import serve
from hasten.runtime.topology import Topology


@pytest.fixture(scope="module", autouse=True)
def first_store() -> None:
    """The first store of a process opens a pipe that torch keeps for all later ones."""
    serve("127.0.0.1", 0, timedelta(seconds=5), alone=True)


def test_two_that_say_they_are_rank_0_meet_at_one_store_however_close_they_come() -> (
    None
):
    for _ in range(25):
        port, gate = network.free_port(), threading.Barrier(2, timeout=20)
        env = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        topology = Topology.from_env(env)

        def open_store(
            name: str, topology: Topology = topology, gate: threading.Barrier = gate
        ) -> bool:
            gate.wait()
            store = task._open_store(topology)
            store.set(name, "here")
            store.wait(["first", "second"], timedelta(seconds=20))
            gate.wait()  # one of the two serves it
            return store.host == "127.0.0.1"

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(open_store, ("first", "second"))) == [True, True]
