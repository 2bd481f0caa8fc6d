"""The store listens where its address points, and on all interfaces only when it must, saying so."""

from __future__ import annotations

import logging
import socket
from datetime import timedelta
from pathlib import Path

import pytest

from hasten.runtime import store

WITHIN = timedelta(seconds=20)


def listening_addresses() -> set[str]:
    """The addresses on which this process listens, as /proc writes them."""
    own_sockets = {
        str(link.readlink())
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink()
    }
    rows = [
        row.split()
        for kind in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    return {
        row[1].partition(":")[0]
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in own_sockets
    }


@pytest.fixture(autouse=True, scope="module")
def open_first_store() -> None:
    """The first store of a process makes a pipe that its native library keeps forever."""
    store.serve_store("127.0.0.1", 0, WITHIN)


@pytest.mark.parametrize(
    ("address", "shown"),
    [("127.0.0.1", "0100007F"), ("localhost", "0100007F"), ("127.0.0.2", "0200007F")],
)
def test_a_loopback_address_is_bound_alone(address: str, shown: str) -> None:
    initial_addresses = listening_addresses()
    served = store.serve_store(address, 0, WITHIN)
    assert listening_addresses() - initial_addresses <= {shown}
    assert shown in listening_addresses()
    client = store.join_store(address, served.port, WITHIN)
    client.set("key", "value")
    assert served.get("key") == b"value"


def test_a_port_in_use_is_an_error_at_once() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match="in use"),
    ):
        store.serve_store("127.0.0.1", taken.getsockname()[1], WITHIN)


def test_an_address_of_another_machine_opens_all_interfaces_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        store._open_listener("192.0.2.1", 0, alone=False).close()
    assert (
        "listens on all interfaces, because 192.0.2.1 is not an address of this machine"
        in caplog.text
    )
    # a host name that the machine calls 127.0.1.1: no other machine would reach that
    name = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kw: name)
    with (
        store._open_listener("myself", 0, alone=False) as open_listener,
        store._open_listener("myself", 0, alone=True) as loopback_listener,
    ):
        assert loopback_listener.getsockname()[0] == "127.0.1.1"
        assert open_listener.getsockname()[0] in ("::", "0.0.0.0")
