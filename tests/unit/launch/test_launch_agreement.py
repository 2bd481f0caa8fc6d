"""The exit code of a job of several machines: all agree on it before any leaves, over a real store and in any order."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from torch.distributed import HashStore

from hasten.launch.elastic.peers import (
    PeerMachineFailed,
    Peers,
    agreed_code,
    agreed_exit_code,
)
from hasten.launch.failure import PREEMPTED


def test_a_failure_counts_more_than_a_stop_and_a_stop_more_than_success() -> None:
    for count in range(1, 5):
        for codes in itertools.product((0, PREEMPTED, 1, 137), repeat=count):
            agreed = agreed_code(codes)
            failed = [code for code in codes if code in (1, 137)]
            assert agreed == (failed[0] if failed else max(codes))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_no_machine_leaves_before_all_have_saved(count: int) -> None:
    for slowest in range(count):
        assert leave_together(count, slowest) == [(PREEMPTED, count)] * count


def leave_together(count: int, slowest: int) -> list[tuple[int, int]]:
    """For every machine: its exit code, and how many had saved when it left; machine `slowest` saves longest."""
    store = HashStore()
    saved, departures = list[int](), list[tuple[int, int]]()

    def machine(index: int) -> None:
        time.sleep(0.1 * (index == slowest))
        saved.append(index)
        # they may end in different rounds
        peers = Peers(store, index, ("host",) * count, round=index % 2)
        departures.append((agreed_exit_code(peers, PREEMPTED, saving_s=30), len(saved)))

    threads = [threading.Thread(target=machine, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return departures


def test_a_machine_that_never_answers_is_not_waited_for_long() -> None:
    peers = Peers(HashStore(), 0, ("here", "gone"), round=0)
    start = time.monotonic()
    assert peers.agree_on_code(1, timeout_s=0.2) == 1
    assert time.monotonic() - start < 10


def test_a_machine_that_was_stopped_ends_the_others_but_one_that_saved_does_not() -> (
    None
):
    for code in (0, PREEMPTED, 143):
        store = HashStore()
        stopped_peers, running_peers = (
            Peers(store, index, ("gone", "here"), round=0) for index in range(2)
        )
        stopped_peers.agree_on_code(code, timeout_s=0)
        if code != 143:
            running_peers.read_machines()
            continue
        with pytest.raises(
            PeerMachineFailed, match=r"machine 0 \(gone\) was stopped \(exit code 143\)"
        ) as caught:
            running_peers.read_machines()
        assert caught.value.code == 143


def test_ranks_that_have_ended_are_known_on_every_machine() -> None:
    store = HashStore()
    first_peers, second_peers = (
        Peers(store, index, ("a", "b"), round=0) for index in range(2)
    )
    restarted_peers = Peers(store, 1, ("a", "b"), round=1)
    assert first_peers.ended_anywhere() == {}
    second_peers.ended.update({3: 0})
    assert second_peers.ended_anywhere() == {3: 0}
    first_peers.ended.update({0: 0})
    assert first_peers.ended_anywhere() == {0: 0, 3: 0}
    assert restarted_peers.ended_anywhere() == {}, "another start of the job"


def test_a_stop_is_known_to_all() -> None:
    store = HashStore()
    stopping_peers, informed_peers = (
        Peers(store, index, ("a", "b"), round=index) for index in range(2)
    )
    assert not informed_peers.is_stopping()
    stopping_peers.say_stopping()
    assert informed_peers.is_stopping()
