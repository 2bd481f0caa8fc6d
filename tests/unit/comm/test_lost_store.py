"""A rank that waits for others whose store dies gets our error, and not a bare network error."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, HashStore, TCPStore

from hasten.comm.process_group import RollCall
from hasten.errors import MissingRanksError, PeerFailedError


def test_a_store_that_dies_is_told() -> None:
    reader, writer = os.pipe()
    server = os.fork()
    if server == 0:
        try:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(writer, str(store.port).encode())
            time.sleep(60)
        finally:
            os._exit(0)
    port = int(os.read(reader, 20))
    os.close(reader)
    os.close(writer)
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=20),
    )
    killer = threading.Timer(1.5, os.kill, (server, signal.SIGKILL))
    killer.start()
    with pytest.raises(
        PeerFailedError,
        match=r"rank 1 lost the group's store after .* at 'wait_for_everyone'",
    ) as caught:
        RollCall(store, rank=1, ranks=(0, 1, 2), timeout_s=20).wait("wait_for_everyone")
    killer.join()
    os.waitpid(server, 0)
    assert isinstance(caught.value.__cause__, DistNetworkError)


def test_one_rank_speaks_for_all_that_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hasten.comm.process_group._REPORT_AFTER_S", 0.2)
    store = HashStore()

    def wait(rank: int) -> None:
        with pytest.raises(MissingRanksError):
            RollCall(store, rank, ranks=(0, 1, 2, 3), timeout_s=0.6).wait("here")

    waiting = [threading.Thread(target=wait, args=(rank,)) for rank in (1, 2)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    (waiting_report,) = caplog.messages
    assert waiting_report.startswith(
        "rank 1 has waited 0 s at 'here': rank 0 has not arrived; rank 3 has not arrived"
    )
