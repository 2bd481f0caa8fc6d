"""The check-in: every fault is found by every machine, at every size; the table of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest

from hasten.errors import LaunchError
from hasten.launch.checkin import (
    Report,
    check_agreement,
    gather_reports,
    list_differences,
    rank_table,
)


class SharedStore:
    """A key-value store for threads that behaves as torch's does."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: str, /) -> None:
        """Keep a value."""
        with self.changed:
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key: str, /) -> bytes:
        """The value, once there is one."""
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, timeout=10)
            return self.values[key]

    def add(self, key: str, value: int, /) -> int:
        """Count up and return the sum."""
        with self.changed:
            total = int(self.values.get(key, b"0")) + value
            self.values[key] = str(total).encode()
            return total

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Return when all keys are there."""
        for key in keys:
            self.get(key)


def machine_report(index: int, **changes: object) -> Report:
    """The report of machine `index`, like all others but for `changes`."""
    base = Report(
        host=f"h{index}",
        address=f"10.0.0.{index}",
        num_processes=1,
        config="c",
        code="k",
        program="train.py",
        versions={"torch": "2.13.0", "hasten": "0.1.0"},
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def meet_in_threads(
    indices: list[int],
    count: int,
    timeout_s: float = 5.0,
    words: list[str] | None = None,
) -> list[list[Report] | str]:
    """What each participant gets: the reports, or the message of its error."""
    store = SharedStore()
    report_waiting: Callable[[str], None] = (words if words is not None else []).append

    def participate(position: int, index: int) -> list[Report] | str:
        try:
            sent_report = machine_report(position)
            return gather_reports(
                store,
                index,
                count,
                sent_report,
                timeout_s=timeout_s,
                report_waiting=report_waiting,
            )
        except LaunchError as error:
            return str(error)

    with ThreadPoolExecutor(max_workers=len(indices)) as pool:
        return list(pool.map(participate, range(len(indices)), indices))


def test_all_see_all_at_every_size() -> None:
    for count in range(1, 17):
        for received in meet_in_threads(list(range(count)), count):
            assert isinstance(received, list)
            assert [r.host for r in received] == [f"h{i}" for i in range(count)]


def test_two_machines_with_one_rank_are_told_to_all() -> None:
    for received in meet_in_threads([0, 1, 1], 3):
        assert isinstance(received, str)
        assert "both claim to be machine 1 of 3" in received
        assert "h1 (10.0.0.1)" in received
        assert "h2 (10.0.0.2)" in received
        assert "Correct --machine_rank" in received


def test_missing_machines_are_named() -> None:
    for received in meet_in_threads([0, 3], 5, timeout_s=0.3):
        assert isinstance(received, str)
        assert received.startswith(
            "machine 1, machine 2, machine 4 of 5 did not check in within 0.3 s"
        )


def test_differences_name_machines_and_values() -> None:
    reports = [
        machine_report(0),
        machine_report(1),
        machine_report(
            2, versions={"torch": "2.11.0", "hasten": "0.1.0"}, code="other"
        ),
    ]
    assert list_differences(reports) == [
        "the code of train.py: k on h0, h1; other on h2",
        "torch: 2.13.0 on h0, h1; 2.11.0 on h2",
    ]


def test_a_changed_setting_is_named_by_itself() -> None:
    left = machine_report(
        0, config="a", settings={"mixed_precision": "'bf16'", "strategy": "'ddp'"}
    )
    right = machine_report(1, config="b", settings={"strategy": "'ddp'"})
    assert list_differences([left, right]) == [
        "the setting mixed_precision: 'bf16' on h0; its default on h1"
    ]
    with pytest.raises(LaunchError, match=r"the machines differ(.|\n)*--check_in warn"):
        check_agreement([left, right])


def test_an_absent_package_is_a_difference() -> None:
    assert list_differences(
        [machine_report(0), machine_report(1, versions={"hasten": "0.1.0"})]
    ) == ["torch: 2.13.0 on h0; absent on h1"]


def test_the_number_asked_for_is_checked() -> None:
    check_agreement([machine_report(0), machine_report(1)], expected_world_size=2)
    with pytest.raises(
        LaunchError,
        match=r"num_processes=3 is the total .* start 2 \(1 on h0, 1 on h1\)",
    ):
        check_agreement([machine_report(0), machine_report(1)], expected_world_size=3)


def test_the_table_counts_ranks_over_machines() -> None:
    table = rank_table(
        [
            machine_report(0, num_processes=2),
            machine_report(1),
            machine_report(2, num_processes=4),
        ]
    )
    assert [line.split()[:3] for line in table.splitlines()[1:]] == [
        ["0", "0-1", "h0"],
        ["1", "2", "h1"],
        ["2", "3-6", "h2"],
    ]


def test_reports_travel() -> None:
    assert Report.decode(machine_report(3).encode()) == machine_report(3)
