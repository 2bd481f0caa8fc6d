"""The sockets through which ranks of this machine tell how they are: where they lie, who may connect, and asking. No torch."""

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
_KNOCK_S: Final = 0.2
POST: Final = "post"
"""The key of a request to post on the bulletin what the rank is doing."""
_LARGEST: Final = 1 << 22
_SUFFIX: Final = ".sock"


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Where one rank listens."""

    job: int
    """The pid of the process that started the ranks of this machine."""
    rank: int
    pid: int
    number: int = 0
    """Counts the Accelerators of one process."""

    @property
    def name(self) -> str:
        """The file's name, which says whose socket it is without asking."""
        return f"{self.job}.{self.rank}.{self.pid}.{self.number}{_SUFFIX}"

    @classmethod
    def parse(cls, name: str) -> Address | None:
        """Return the address in a file's name; None for other files."""
        parts = name.removesuffix(_SUFFIX).split(".")
        if not name.endswith(_SUFFIX) or len(parts) != 4 or not all(part.isdecimal() for part in parts):
            return None
        return cls(*map(int, parts))


def private_folder(folder: Path) -> Path:
    """Return the folder, made if it is missing, which nobody but this user may enter.

    Raises: CommError if somebody else owns it, or others may enter it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise CommError(
            f"{folder} belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):o}; others could read or answer in place "
            f"of this job. Remove it, or run `chmod 700 {folder}` if it is yours."
        )
    return folder


def peer_is_owner(connection: socket.socket) -> bool:
    """Return whether the process at the other end runs as this user, as the kernel says."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:  # other systems: the folder's mode keeps others out
        return True
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    return bool(user == os.geteuid())


def listening(folder: Path) -> Iterator[tuple[Address, Path]]:
    """Yield the sockets of ranks that are alive, in order; those that killed processes left behind are removed."""
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        address = Address.parse(path.name)
        if address is None:
            continue
        if _is_alive(address.pid):
            yield address, path
        else:
            path.unlink(missing_ok=True)


def ask(path: Path, request: dict[str, Any]) -> dict[str, Any] | None:  # Any: JSON values
    """What the rank answers; None if it has ended or does not answer in time."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(str(path))
            connection.sendall(msgspec.json.encode(request) + b"\n")
            return msgspec.json.decode(receive_line(connection), type=dict[str, Any])
        except (OSError, msgspec.DecodeError):  # it ended meanwhile, or is stopped
            return None


def knock(path: Path) -> None:
    """Ask the rank to post what it is doing, without waiting for an answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_KNOCK_S)
        try:
            connection.connect(str(path))
            connection.sendall(msgspec.json.encode({POST: True}) + b"\n")
        except OSError:  # it ended, or takes no calls: then it says nothing, which the asker sees
            return


def receive_line(connection: socket.socket) -> bytes:
    """Return the bytes up to a line's end, or to the end of the connection."""
    received = b""
    while not received.endswith(b"\n") and len(received) < _LARGEST:
        part = connection.recv(1 << 16)
        if not part:
            break
        received += part
    return received


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process has this pid now
        return False
    return True
