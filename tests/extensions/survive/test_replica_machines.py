"""Launchers of replicas on several machines: who runs which replicas, what they tell each other, and who is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from hasten.errors import LaunchError
from hasten.extensions.survive.replica_machines import (
    MachineClient,
    MachineNotes,
    MachineServer,
    merge_notes,
    replicas_of_machine,
)
from hasten.launch.base import Meeting
from hasten.launch.checkin import Report
from hasten.launch.network import free_port

REPORT = Report("host-a", "", 1, config="settings", code="code")
TOKEN = b"0123456789abcdef"


def test_each_replica_is_on_one_machine() -> None:
    for replicas in range(1, 17):
        for machines in range(1, replicas + 1):
            replicas_by_machine = [
                replicas_of_machine(replicas, machines, rank)
                for rank in range(machines)
            ]
            assert [
                number
                for machine_replicas in replicas_by_machine
                for number in machine_replicas
            ] == list(range(replicas))
            assert (
                max(map(len, replicas_by_machine)) - min(map(len, replicas_by_machine))
                <= 1
            )


def test_the_facts_of_all_machines_are_joined() -> None:
    first = MachineNotes(running=2, joined=["1", "0"], agreed="9 x")
    second = MachineNotes(running=1, joined=["3"], agreed="10 y", finished=True)
    merged = merge_notes({0: first, 1: second})
    assert (merged.joined, merged.agreed, merged.finished, merged.running) == (
        ["0", "1", "3"],
        "10 y",
        True,
        3,
    )
    assert merge_notes({}).agreed == ""


@contextmanager
def serving(
    check_in: str = "error",
) -> Iterator[tuple[MachineServer, Meeting, list[str]]]:
    """Context manager with machine 0 of three machines; yields it, the rendezvous and its messages."""
    messages: list[str] = []
    meeting = Meeting(max_machines=3, port=free_port(), join_timeout_s=5.0)
    server = MachineServer(meeting, REPORT, check_in, TOKEN, messages.append)
    server.lighthouse = "here:1"
    try:
        yield server, meeting, messages
    finally:
        server.close(0)


def client(
    meeting: Meeting,
    rank: int | None,
    host: str = "host-b",
    token: bytes = TOKEN,
    **changes: str,
) -> MachineClient:
    report = replace(REPORT, host=host, **changes)  # type: ignore[arg-type]  # settings and code are texts
    return MachineClient(
        replace(meeting, machine_rank=rank), report, token, lambda words: None
    )


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_machines_learn_what_the_others_know_and_the_end() -> None:
    with serving() as (server, meeting, _):
        connected = client(meeting, 1)
        assert (connected.rank, connected.lighthouse) == (1, "here:1")
        notes = MachineNotes(running=2, joined=["2"], agreed="4 x")
        wait_until(lambda: connected.exchange_notes(notes, None).joined == ["2"])
        wait_until(
            lambda: server.exchange_notes(MachineNotes(joined=["0"]), 15).running == 2
        )
        wait_until(lambda: connected.exchange_notes(notes, None).stop == 15)
        assert connected.exchange_notes(notes, None).agreed == "4 x"
        assert connected.broken_s == 0.0
        server.close(85)
        wait_until(lambda: connected.exchange_notes(notes, None).code == 85)
        connected.close(85)


def test_a_machine_that_closes_its_connection_is_forgotten_and_may_return() -> None:
    with serving() as (server, meeting, messages):
        first_client = client(meeting, None)
        first_client.exchange_notes(MachineNotes(running=2, joined=["1"]), None)
        wait_until(lambda: server.exchange_notes(MachineNotes(), None).joined == ["1"])
        first_client.close(1)
        wait_until(lambda: server.exchange_notes(MachineNotes(), None).running == 0)
        assert server.exchange_notes(MachineNotes(), None).joined == []
        second_client = client(meeting, None, "host-c")
        third_client = client(meeting, None)
        assert {second_client.rank, third_client.rank} == {1, 2}
        wait_until(lambda: any("is back" in words for words in messages))
        second_client.close(0)
        third_client.close(0)


def test_strangers_duplicates_and_other_settings_are_refused() -> None:
    with serving() as (_, meeting, _):
        connected = client(meeting, 1)
        with pytest.raises(
            LaunchError, match=r"machine 1 of 3, and the ranks \[0, 1\] are taken"
        ):
            client(meeting, 1, "host-c")
        with pytest.raises(LaunchError, match="the same HASTEN_TOKEN"):
            client(meeting, 2, token=b"another")
        with pytest.raises(LaunchError, match="the machines differ: the settings"):
            client(meeting, 2, config="others")
        with pytest.raises(LaunchError, match="--num_machines"):
            client(meeting, 3)
        connected.close(0)
    with serving("warn") as (_, meeting, _):
        client(meeting, 2, config="others").close(0)


def test_a_machine_does_not_wait_forever_for_machine_0() -> None:
    meeting = Meeting(
        max_machines=2, port=free_port(), join_timeout_s=0.3, machine_rank=1
    )
    with pytest.raises(
        LaunchError, match=r"does not respond at 127.0.0.1:\d+ .* --machine_rank 0"
    ):
        MachineClient(meeting, REPORT, TOKEN, lambda words: None)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(
        LaunchError, match="--main_process_ip an address of this machine"
    ):
        MachineServer(
            Meeting(max_machines=2, address="192.0.2.1", port=1),
            REPORT,
            "error",
            TOKEN,
            print,
        )
