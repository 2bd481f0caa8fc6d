"""Key-value store of a job, served only on the interface of its address. Torch's store listens on all interfaces."""

from __future__ import annotations

import errno
import logging
import socket
from datetime import timedelta
from typing import Final

from torch.distributed import DistError, TCPStore

log = logging.getLogger(__name__)

LOST: Final = (DistError, RuntimeError, OSError)
"""Errors raised by a store whose server is gone."""
_LOOPBACK_NAMES: Final = ("localhost", "::1")
_BACKLOG: Final = 2048
_FOREIGN_ADDRESS_ERRORS: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def serve_store(
    address: str,
    port: int,
    timeout: timedelta,
    *,
    alone: bool = False,
) -> TCPStore:
    """Serve a store at `address` and return it; port 0 selects a free port.

    `alone` means that every client is on this machine.
    Raises: OSError if the port is in use; DistError if the store cannot be reached at its address.
    """
    with _open_listener(address, port, alone) as listener:
        bound_port = listener.getsockname()[1]
        return TCPStore(
            address,
            bound_port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def join_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Return a client of the store at `address`.

    Raises: DistError if no server answers in time.
    """
    return TCPStore(
        address, port, is_master=False, wait_for_workers=False, timeout=timeout
    )


def is_loopback(address: str) -> bool:
    """Return whether `address` is a loopback address, which means this machine on every machine."""
    return address in _LOOPBACK_NAMES or address.startswith("127.")


def loopback_interface() -> str | None:
    """Return the name of the loopback interface, for libraries that are configured by interface name."""
    interface_names = {interface_name for _, interface_name in socket.if_nameindex()}
    for interface_name in ("lo", "lo0"):
        if interface_name in interface_names:
            return interface_name
    return None


def _open_listener(address: str, port: int, alone: bool) -> socket.socket:
    address_infos = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    is_local = alone or is_loopback(address)
    for family, _, _, _, sockaddr in sorted(
        address_infos, key=lambda address_info: address_info[0] != socket.AF_INET
    ):
        if is_loopback(str(sockaddr[0])) and not is_local:
            # many Linux machines resolve their name to 127.0.1.1, which no other machine reaches
            continue
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(sockaddr)
            # if two processes bind at the same moment, the second fails only here
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno in _FOREIGN_ADDRESS_ERRORS:
                continue
            raise
        return listener
    return _listen_everywhere(address, port)


def _listen_everywhere(address: str, port: int) -> socket.socket:
    """Listen on all interfaces: behind a service name, others connect to an address that this machine does not have."""
    log.warning(
        "the store listens on all interfaces, because %s is not an address of this machine; give the address of one of its "
        "interfaces as main_process_ip to listen there alone",
        address,
    )
    is_dual_stack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual_stack else socket.AF_INET
    return socket.create_server(
        ("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual_stack
    )
