"""Addresses, interfaces and ports of this machine."""

from __future__ import annotations

import socket
import sys

import pytest

from hasten.launch import network


def test_own_addresses() -> None:
    assert network.owns_address("127.0.0.1")
    assert network.owns_address("localhost")
    # reserved for documentation: nobody has it
    assert not network.owns_address("192.0.2.7")
    assert not network.owns_address("no.such.host.invalid")


def test_the_way_to_this_machine_is_the_loopback() -> None:
    assert network.address_towards("127.0.0.1") == "127.0.0.1"
    assert network.address_towards("no.such.host.invalid") == "no.such.host.invalid"
    assert network.address_for_others("127.0.0.1") == "127.0.0.1"
    assert network.address_for_others("no.such.host.invalid") == "no.such.host.invalid"
    assert network.is_loopback("localhost")
    assert not network.is_loopback("10.0.0.1")


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_the_loopback_interface_has_a_name() -> None:
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.interface_of("192.0.2.7") is None


def test_ports() -> None:
    port = network.free_port()
    with socket.create_server(("", port)):
        assert network.is_reachable("127.0.0.1", port)
    assert not network.is_reachable("127.0.0.1", port)
