"""A rank that waits says who is missing, and a group that cannot form says why and after how long."""

from __future__ import annotations

import re
import socket
import threading
import time
from contextlib import closing
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, TCPStore

from hasten.errors import CommError
from hasten.runtime import bootstrap
from hasten.runtime.bootstrap import GroupSettings, RankRegistration, start
from hasten.runtime.nodelist import ranks_in_words
from hasten.runtime.topology import Topology

pytestmark = pytest.mark.timed


@pytest.fixture(scope="module", autouse=True)
def native_leftovers() -> None:
    """The first store of a process makes a pipe that its native library keeps forever: let it be made before we look."""
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_the_lowest_rank_that_is_there_says_who_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert bootstrap._FIRST_REPORT_S == 5 * bootstrap._POLL_INTERVAL_S == 5.0, (
        "after five seconds; here a tenth of all times"
    )
    monkeypatch.setattr(bootstrap, "_POLL_INTERVAL_S", 0.1)
    monkeypatch.setattr(bootstrap, "_FIRST_REPORT_S", 0.5)
    limit = timedelta(seconds=0.9)

    def wait(store: HashStore, rank: int, size: int) -> None:
        with pytest.raises(RuntimeError, match="not all ranks have come"):
            RankRegistration(store, rank, size, limit, address="there").wait()

    full, headless = HashStore(), HashStore()
    calls = [(full, 0, 5), (full, 3, 5), (headless, 1, 2)]
    threads = [threading.Thread(target=wait, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reports = sorted(message.rpartition(" (")[0] for message in caplog.messages)
    assert reports == [
        "rank 0 of 5 waits for ranks 1-2, 4 at there",
        "rank 1 of 2 waits for rank 0 at there",
    ]


def test_a_short_wait_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    threads = [
        threading.Thread(
            target=RankRegistration(store, rank, 2, timedelta(seconds=5)).wait
        )
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert not caplog.messages


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that starting a group on the loopback sets where the user has not."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")


@pytest.mark.usefixtures("interface")
def test_a_port_in_use_is_told_as_such_and_at_once() -> None:
    with closing(socket.create_server(("", 0))) as listener:
        port = listener.getsockname()[1]
        main = Topology(
            world_size=2, local_world_size=2, rendezvous=f"tcp://127.0.0.1:{port}"
        )
        begin = time.monotonic()
        with pytest.raises(CommError, match="another program uses this port") as caught:
            start(main, torch.device("cpu"), settings=GroupSettings(init_timeout_s=300))
    assert time.monotonic() - begin < 60
    assert "300 s" not in str(caught.value)


@pytest.mark.usefixtures("interface")
def test_the_time_that_is_told_is_the_time_that_passed() -> None:
    with closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        rank = Topology(
            rank=1, world_size=2, local_rank=1, local_world_size=2, rendezvous=url
        )
        begin = time.monotonic()
        with pytest.raises(CommError, match="did not meet the others") as caught:
            start(rank, torch.device("cpu"), settings=GroupSettings(init_timeout_s=1))
    elapsed_s = time.monotonic() - begin
    reported = re.search(r"within (\d+) s", str(caught.value))
    assert reported is not None
    assert abs(int(reported[1]) - elapsed_s) < 1


def test_ranks_in_words() -> None:
    assert [ranks_in_words(ranks) for ranks in ([], [3], [1, 2], [5, 0, 2, 3])] == [
        "",
        "rank 3",
        "ranks 1-2",
        "ranks 0, 2-3, 5",
    ]
