"""Duties of replicas: one of those that made the latest update leads, and a signal ends the run or one replica."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hasten.extensions.survive.duties import Duties
from hasten.extensions.survive.folder import STOPPING_FILE


def several(names: str) -> dict[str, Duties]:
    return {name: Duties(name, Path("absent")) for name in names}


def leaders(duties_by_name: dict[str, Duties]) -> list[str]:
    return [name for name, duties in duties_by_name.items() if duties.leads]


def test_the_first_leads_before_and_after_updates() -> None:
    duties_by_name = several("012")
    assert leaders(duties_by_name) == ["0"]
    for duties in duties_by_name.values():
        duties.record_update("210")
    assert leaders(duties_by_name) == ["0"]


def test_a_healed_replica_leads_after_its_next_update_only() -> None:
    """It has run the epochs that were completed without it: what it would save for them is older than what is there."""
    duties_by_name = several("012")
    for name in "12":
        duties_by_name[name].record_update("12")
    duties_by_name["0"].record_healing()
    assert leaders(duties_by_name) == ["1"]
    assert duties_by_name["0"].behind
    for duties in duties_by_name.values():
        duties.record_update("012")
    assert leaders(duties_by_name) == ["0"]
    assert not duties_by_name["0"].behind


def test_a_replica_that_is_healed_at_the_end_of_an_epoch_does_not_lead_there() -> None:
    duties_by_name = several("012")
    for name in "12":
        duties_by_name[name].record_update("12")
        # 0 is healed here, and is a member when they meet again
        duties_by_name[name].record_epoch_end("12", [])
    duties_by_name["0"].record_healing()
    for duties in duties_by_name.values():
        duties.record_epoch_end("012", "0")
    assert leaders(duties_by_name) == ["1"]
    assert not duties_by_name["0"].behind  # its loop is at the end of the same epoch


def test_the_last_replica_leads_even_if_it_was_just_healed() -> None:
    duties = Duties("2", Path("absent"))
    duties.record_healing()
    duties.record_epoch_end("2", [])
    assert duties.leads


def test_a_lost_leader_is_replaced_at_the_end_of_an_epoch() -> None:
    duties_by_name = several("12")
    for duties in duties_by_name.values():
        duties.record_update("012")
        duties.record_epoch_end("12", [])
    assert leaders(duties_by_name) == ["1"]


def asks_and_leaves(duties: Duties) -> tuple[bool, bool]:
    return duties.asks_to_stop, duties.leaves


@pytest.mark.parametrize("healed", [False, True])
def test_a_signal_to_the_whole_run_is_agreed_on_in_an_update(
    tmp_path: Path, healed: bool
) -> None:
    duties = Duties("1", tmp_path)
    duties.record_update("01")
    assert asks_and_leaves(duties) == (False, False)
    (tmp_path / STOPPING_FILE).touch()
    assert asks_and_leaves(duties) == (False, False)  # this process has not received it
    duties.received = lambda: 15
    assert asks_and_leaves(duties) == (True, False)
    if healed:
        # it has nothing that the others do not have, so it need not wait for an update
        duties.record_healing()
    else:
        duties.record_update("01", ends_run=True)
    assert duties.leaves


def test_a_replica_learns_the_signal_of_the_others_in_the_update(
    tmp_path: Path,
) -> None:
    duties = Duties("1", tmp_path)
    duties.record_update("01", ends_run=True)
    assert duties.leaves


def test_a_signal_to_one_replica_lets_it_leave(tmp_path: Path) -> None:
    duties = Duties("1", tmp_path)
    duties.record_update("01")
    duties.received = lambda: 15
    assert asks_and_leaves(duties) == (False, True)


def test_a_replica_that_receives_the_signal_before_its_launcher_waits_for_the_others(
    tmp_path: Path,
) -> None:
    """Schedulers signal all processes at once; the launcher tells a moment later that the whole run was told to stop."""
    duties = Duties("1", tmp_path)
    duties.record_update("01")
    duties.received = lambda: 15
    launcher = threading.Timer(0.2, (tmp_path / STOPPING_FILE).touch)
    launcher.start()
    assert asks_and_leaves(duties) == (False, False)
    launcher.join()
    # it leaves with the others, after the update in which all agree
    assert asks_and_leaves(duties) == (True, False)
