"""The newest lines of the log: in whatever order those who keep them stop, none stays behind."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from hasten import Accelerator
from hasten.extensions.watch.status_server import RecentLog

log = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def plain_factory() -> Iterator[None]:
    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(logging.LogRecord)
    yield
    logging.setLogRecordFactory(before)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_stopped_in_any_order_none_stays(order: tuple[int, ...]) -> None:
    keepers = [RecentLog() for _ in order]
    for one in keepers:
        one.start()
    for count, number in enumerate(order):
        log.warning("line %d", count)
        running = [keepers[later] for later in order[count:]]
        assert [one.lines[-1].rpartition(" ")[2] for one in running] == [
            str(count)
        ] * len(running)
        keepers[number].stop()
    assert logging.getLogRecordFactory() is logging.LogRecord
    assert not any(one.lines for one in keepers)


def test_a_thousand_accelerators_one_after_another_leave_no_chain() -> None:
    """The next one is made before the last one is given back, as `accelerator = Accelerator()` in a loop does it."""
    keepers = [RecentLog()]
    keepers[0].start()
    for _ in range(2000):
        keepers.append(RecentLog())
        keepers[-1].start()
        keepers.pop(0).stop()
    log.warning("still here")  # a chain of factories would be too deep for Python
    assert keepers[0].lines[-1].endswith("still here")
    keepers[0].stop()
    first = Accelerator(cpu=True)
    second = Accelerator(cpu=True)
    first.end_training()
    second.end_training()
    assert logging.getLogRecordFactory() is logging.LogRecord


def test_a_foreign_factory_in_front_stays_and_works() -> None:
    keeper = RecentLog()
    keeper.start()
    behind = logging.getLogRecordFactory()

    def foreign(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = behind(*args, **kwargs)
        record.foreign = True
        return record

    logging.setLogRecordFactory(foreign)
    newer = RecentLog()
    newer.start()
    keeper.stop()
    log.warning("told")
    assert newer.lines
    assert not keeper.lines
    newer.stop()
    assert logging.getLogRecordFactory() is foreign
