"""Status sockets of the ranks of this machine: their paths, access checks and requests. Does not import torch."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from hasten.errors import CommError

ANSWER_S: Final = 5.0
_MOST_BYTES: Final = 1 << 22
_SOCKET_SUFFIX: Final = ".sock"


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Address of one rank's socket."""

    job: int
    """The pid of the process that started the ranks of this machine."""
    rank: int
    pid: int
    number: int = 0
    """Index of the Accelerator within its process."""

    @property
    def name(self) -> str:
        """The file name, which identifies the rank."""
        return f"{self.job}.{self.rank}.{self.pid}.{self.number}{_SOCKET_SUFFIX}"

    @classmethod
    def parse_name(cls, name: str) -> Address | None:
        """Return the address in a file name; None for other files."""
        name_parts = name.removesuffix(_SOCKET_SUFFIX).split(".")
        if (
            not name.endswith(_SOCKET_SUFFIX)
            or len(name_parts) != 4
            or not all(name_part.isdecimal() for name_part in name_parts)
        ):
            return None
        return cls(*map(int, name_parts))


def private_folder(folder: Path) -> Path:
    """Create the folder if it is missing, accessible to this user only, and return it.

    Raises: CommError if another user owns it, or others have access.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder_stat = folder.lstat()
    if (
        not stat.S_ISDIR(folder_stat.st_mode)
        or folder_stat.st_uid != os.geteuid()
        or stat.S_IMODE(folder_stat.st_mode) & 0o077
    ):
        raise CommError(
            f"{folder} belongs to user {folder_stat.st_uid} and has mode {stat.S_IMODE(folder_stat.st_mode):o}; other users could impersonate this "
            f"job. Remove it, or run `chmod 700 {folder}` if it is yours."
        )
    return folder


def peer_is_owner(connection: socket.socket) -> bool:
    """Return whether the process at the other end runs as this user, according to the kernel."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:  # other systems: the folder's mode denies access to others
        return True
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i"))
    )
    return bool(user == os.geteuid())


def live_sockets(folder: Path) -> Iterator[tuple[Address, Path]]:
    """Yield the sockets of live ranks, in order; sockets left by killed processes are removed."""
    for socket_path in sorted(folder.glob(f"*{_SOCKET_SUFFIX}")):
        address = Address.parse_name(socket_path.name)
        if address is None:
            continue
        if _is_alive(address.pid):
            yield address, socket_path
        else:
            socket_path.unlink(missing_ok=True)


# Any: JSON values
def request_status(socket_path: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """Send a request to a rank and return its answer; None if the rank has ended or does not answer in time."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(str(socket_path))
            connection.sendall(msgspec.json.encode(request) + b"\n")
            return msgspec.json.decode(receive_line(connection), type=dict[str, Any])
        # the rank has ended meanwhile, or is stopped
        except (OSError, msgspec.DecodeError):
            return None


def receive_line(connection: socket.socket) -> bytes:
    """Return the bytes up to the end of a line or of the connection."""
    received = b""
    while not received.endswith(b"\n") and len(received) < _MOST_BYTES:
        received_chunk = connection.recv(1 << 16)
        if not received_chunk:
            break
        received += received_chunk
    return received


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the pid now belongs to another user's process
        return False
    return True
