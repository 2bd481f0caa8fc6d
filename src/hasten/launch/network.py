"""Addresses, interfaces and ports of this machine."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from contextlib import closing
from typing import Final

from hasten.errors import LaunchError

_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
_SIOCGIFADDR: Final = 0x8915  # Linux: address of an interface


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port that is currently free."""
    with closing(socket.create_server((address, 0))) as server:
        return int(server.getsockname()[1])


def check_resolves(address: str) -> None:
    """Raise if the name service of this machine does not know `address`. Raises: LaunchError."""
    try:
        socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise LaunchError(
            f"the host name {address!r} cannot be resolved on this machine ({error}), so machine 0 cannot be found. Correct "
            "--main_process_ip, give a numeric address, or add the name to /etc/hosts or the name service."
        ) from error


def owns_address(address: str) -> bool:
    """Return whether `address` (a name or a number) belongs to this machine."""
    try:
        address_infos = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return False
    for family, _, _, _, sockaddr in address_infos:
        if _can_bind(family, sockaddr):
            return True
    return False


def _can_bind(family: int, sockaddr: tuple[object, ...]) -> bool:
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe_socket:
        try:
            probe_socket.bind(sockaddr)
        except OSError:  # not an address of this machine
            return False
        return True


def address_towards(peer: str) -> str:
    """Return this machine's address on the route to `peer`; `peer` itself if there is no route."""
    try:
        family, _, _, _, sockaddr = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[
            0
        ]
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe_socket:
            # a datagram socket sends nothing here, it only selects the route
            probe_socket.connect(sockaddr)
            return str(probe_socket.getsockname()[0])
    except OSError:
        return peer


def address_for_others(peer: str) -> str:
    """Return the address by which other machines reach this one; `peer` if this machine owns it."""
    local_address = address_towards(peer)
    if local_address.startswith("127.") and not is_loopback(peer):
        return peer
    return local_address


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has the IPv4 `address`, or None if it cannot be found."""
    for _, interface_name in socket.if_nameindex():
        if _interface_address(interface_name) == address:
            return interface_name
    return None


def _interface_address(name: str) -> str | None:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe_socket:
        request = array.array("B", struct.pack("256s", name.encode()[:15]))
        try:
            fcntl.ioctl(probe_socket.fileno(), _SIOCGIFADDR, request, True)
        # an interface without an IPv4 address, or a system without this call
        except OSError:
            return None
    return socket.inet_ntoa(request[20:24].tobytes())


def is_loopback(address: str) -> bool:
    """Return whether `address` is a loopback address, which means this machine on every machine."""
    return address in _LOOPBACK


def is_reachable(address: str, port: int, timeout_s: float = 1.0) -> bool:
    """Return whether something accepts connections at `address`:`port`."""
    try:
        with closing(socket.create_connection((address, port), timeout=timeout_s)):
            return True
    except OSError:
        return False
