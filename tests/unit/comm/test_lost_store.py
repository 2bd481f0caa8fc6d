"""A rank that waits for others whose store dies gets our error, with who had arrived, and not a bare network error."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, TCPStore

from hasten.comm.rollcall import RollCall
from hasten.errors import PeerFailedError


def test_a_store_that_dies_is_told_with_the_ranks_that_were_seen() -> None:
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
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
    killer = threading.Timer(1.5, os.kill, (server, signal.SIGKILL))
    killer.start()
    with pytest.raises(
        PeerFailedError, match=r"rank 1 lost the group's store after .* at 'wait_for_everyone'"
    ) as caught:
        RollCall(store, rank=1, ranks=(0, 1, 2), timeout_s=20).wait("wait_for_everyone")
    killer.join()
    os.waitpid(server, 0)
    assert isinstance(caught.value.__cause__, DistNetworkError)
    assert "rank 0 has not arrived; rank 2 has not arrived" in str(caught.value)
