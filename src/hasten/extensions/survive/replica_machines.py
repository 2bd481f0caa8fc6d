"""Launchers of replicas on several machines: the one of machine 0 serves, the others tell it what they know and learn what all know."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol, TextIO

from hasten.errors import LaunchError
from hasten.launch.base import Meeting
from hasten.launch.checkin import Report, list_differences

_EVERY_S: Final = 0.2
"""Seconds between two messages of a machine."""
_SILENT_S: Final = 3.0
"""Seconds without an answer after which a connection counts as lost and is made anew."""
_LAST_S: Final = 3.0
"""Seconds in which the other machines are told the result of the run."""
_MOST_CHARS: Final = 1 << 20


@dataclass(slots=True)
class MachineNotes:
    """Facts that the launcher of one machine tells the others."""

    running: int = 0
    """Number of replicas that run on this machine, or are about to be started."""
    joined: list[str] = field(default_factory=list)
    """Live replicas that have joined the run and hold its state."""
    agreed: str = ""
    """The update and the history on which the replicas have agreed last, as a replica of this machine has written it."""
    finished: bool = False
    """True if a replica has ended the run with success."""


@dataclass(slots=True)
class RunNotes:
    """Facts of all machines, as machine 0 knows them."""

    joined: list[str] = field(default_factory=list)
    agreed: str = ""
    finished: bool = False
    running: int = 0
    """Number of replicas on the machines that respond."""
    stop: int | None = None
    """Signal with which the whole run was told to stop."""
    code: int | None = None
    """Exit code of the run; None while it runs."""


class MachineNetwork(Protocol):
    """Connection of this machine's launcher to the others."""

    rank: int
    lighthouse: str

    def exchange(self, notes: MachineNotes, stop: int | None) -> RunNotes:
        """Tell this machine's facts, and return the newest ones of all machines; does not wait."""
        ...

    @property
    def broken_s(self) -> float:
        """Seconds for which machine 0 has not responded; 0 while it does."""
        ...

    def close(self, code: int) -> None:
        """Leave; machine 0 tells the others the exit code of the run."""
        ...


def united(all_notes: Mapping[int, MachineNotes]) -> RunNotes:
    """Return the facts of all machines together; of several agreements, the latest one."""
    every = list(all_notes.values())
    return RunNotes(
        joined=sorted(name for one in every for name in one.joined),
        agreed=max((one.agreed for one in every), key=_update_of, default=""),
        finished=any(one.finished for one in every),
        running=sum(one.running for one in every),
    )


def _update_of(agreed: str) -> int:
    first = agreed.partition(" ")[0]
    return int(first) if first.isdecimal() else -1


def own_replicas(replicas: int, machines: int, rank: int) -> range:
    """Return the numbers of the replicas on one machine; the first machines have one more where it does not divide evenly."""
    share, more = divmod(replicas, machines)
    start = rank * share + min(rank, more)
    return range(start, start + share + (rank < more))


def proof(token: bytes | None, nonce: str) -> str:
    """Return the text that proves the knowledge of the job's token."""
    return hmac.new(
        token or b"", f"hasten machines {nonce}".encode(), "sha256"
    ).hexdigest()


# -- machine 0 ---------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Guest:
    """Another machine as machine 0 knows it."""

    host: str
    launcher: str
    """Random text of the launcher's process: a connection of the same one replaces its previous one."""
    notes: MachineNotes = field(default_factory=MachineNotes)
    seen: float = 0.0
    connection: int = 0
    """Number of the machine's current connection; 0 after that was closed."""


class OneMachine:
    """The network of a run on one machine."""

    rank = 0
    broken_s = 0.0

    def __init__(self, lighthouse: str) -> None:
        self.lighthouse = lighthouse

    def exchange(self, notes: MachineNotes, stop: int | None) -> RunNotes:
        """Return this machine's facts."""
        return RunNotes(notes.joined, notes.agreed, notes.finished, notes.running, stop)

    def close(self, code: int) -> None:
        """Do nothing: there is no other machine."""


class MachineServer:
    """Machine 0: accepts the launchers of the other machines for as long as the run lasts, so that lost ones can return."""

    rank = 0
    broken_s = 0.0

    def __init__(
        self,
        meeting: Meeting,
        report: Report,
        check_in: str,
        token: bytes | None,
        say: Callable[[str], None],
    ) -> None:
        self._meeting, self._report, self._check_in, self._token, self._say = (
            meeting,
            report,
            check_in,
            token,
            say,
        )
        self.lighthouse = ""
        """Address of the lighthouse, which the other machines are told; they wait while it is empty."""
        self._own = MachineNotes()
        self._stop: int | None = None
        self._code: int | None = None
        self._guests: dict[int, _Guest] = {}
        self._told: set[int] = set()
        self._connections = 0
        self._open: set[socket.socket] = set()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        try:
            family = socket.getaddrinfo(
                meeting.address, meeting.port, type=socket.SOCK_STREAM
            )[0][0]
            self._server = socket.create_server(
                (meeting.address, meeting.port), family=family, backlog=64
            )
        except OSError as error:
            raise LaunchError(
                f"machine 0 cannot listen at {meeting.address}:{meeting.port} ({error.strerror or error}), so the other machines could not find the "
                "run. Give --main_process_ip an address of this machine, and --main_process_port a free port."
            ) from error
        self._server.settimeout(_EVERY_S)
        self._threads = [
            threading.Thread(target=self._accept, name="hasten-machines", daemon=True)
        ]
        self._threads[0].start()

    def exchange(self, notes: MachineNotes, stop: int | None) -> RunNotes:
        """Record this machine's facts; return the facts of all."""
        with self._lock:
            self._own, self._stop = notes, stop
            return self._run()

    def _run(self) -> RunNotes:
        now = time.monotonic()
        found = united(
            {
                0: self._own,
                **{rank: guest.notes for rank, guest in self._guests.items()},
            }
        )
        silent = [one for one in self._guests.values() if now - one.seen > _SILENT_S]
        found.running -= sum(one.notes.running for one in silent)
        found.stop, found.code = self._stop, self._code
        return found

    def close(self, code: int) -> None:
        """Tell all machines that respond the exit code of the run, then stop listening."""
        if self._closed.is_set():
            return
        with self._lock:
            self._code = code
        until = time.monotonic() + _LAST_S
        while time.monotonic() < until:
            with self._lock:
                there = {
                    rank
                    for rank, one in self._guests.items()
                    if one.connection and time.monotonic() - one.seen < _SILENT_S
                }
                if there <= self._told:
                    break
            time.sleep(_EVERY_S / 4)
        self._closed.set()
        with self._lock:
            for connection in self._open:
                with suppress(OSError):  # closed by the other side
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_LAST_S)
        self._server.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            with suppress(TimeoutError):
                connection, _ = self._server.accept()
                thread = threading.Thread(
                    target=self._serve,
                    args=(connection,),
                    name="hasten-machine",
                    daemon=True,
                )
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        rank, number = None, 0
        connection.settimeout(60.0)
        with self._lock:
            self._open.add(connection)
        # a stranger, or a machine that was lost
        lost = suppress(OSError, ValueError, KeyError, TypeError)
        with lost, connection, connection.makefile("rw", encoding="utf-8") as lines:
            nonce = secrets.token_hex(16)
            _write(lines, {"nonce": nonce})
            rank, number = self._admit(_read(lines), nonce, lines)
            while rank is not None:
                self._answer(rank, number, _read(lines), lines)
        with self._lock:
            self._open.discard(connection)
            if rank is not None and self._guests[rank].connection == number:
                self._guests[
                    rank
                    # its kernel has closed the connection: its replicas end with it
                ].notes = MachineNotes()
                self._guests[rank].connection = 0
                if self._code is None:
                    self._say(
                        f"machine {rank} ({self._guests[rank].host}) has closed its connection; the others continue"
                    )

    def _admit(
        self, hello: Mapping[str, Any], nonce: str, lines: TextIO
    ) -> tuple[int | None, int]:
        """Return the rank of a machine, and the number of its connection; None for one that is refused, which is told why."""
        if not hmac.compare_digest(str(hello["proof"]), proof(self._token, nonce)):
            _write(
                lines,
                {
                    "refused": "it does not have the job's token; set the same HASTEN_TOKEN on all machines, or share the home folder"
                },
            )
            return None, 0
        report = Report.decode(json.dumps(hello["report"]))
        while not self.lighthouse and not self._closed.is_set():
            time.sleep(_EVERY_S / 4)
        with self._lock:
            rank, why = self._rank_of(
                hello["rank"], report, launcher := str(hello["launcher"])
            )
            if why and (self._check_in == "error" or rank is None):
                _write(lines, {"refused": why})
                return None, 0
            assert rank is not None, "a machine without a rank was refused"
            self._connections += 1
            known, number = self._guests.get(rank), self._connections
            notes = known.notes if known else MachineNotes()
            self._guests[rank] = _Guest(
                report.host, launcher, notes, time.monotonic(), number
            )
        self._say(f"machine {rank} ({report.host}) is {'back' if known else 'there'}")
        _write(lines, {"rank": rank, "lighthouse": self.lighthouse, "warning": why})
        return rank, number

    def _rank_of(
        self, wanted: int | None, report: Report, launcher: str
    ) -> tuple[int | None, str]:
        """Return the rank of a machine and the reason to refuse it, empty for none."""
        machines, now = self._meeting.max_machines, time.monotonic()
        live = {
            rank
            for rank, one in self._guests.items()
            if one.connection and now - one.seen < _SILENT_S
        }
        busy = {rank for rank in live if self._guests[rank].launcher != launcher}
        free = [rank for rank in range(1, machines) if rank not in busy]
        same = [
            rank
            for rank in free
            if rank in self._guests and self._guests[rank].host == report.host
        ]
        rank = wanted if wanted is not None else next(iter([*same, *free]), None)
        if rank is None or rank in busy or not 0 < rank < machines:
            return None, (
                f"{report.host} wants to be machine {'of any rank' if rank is None else rank} of {machines}, and the ranks {sorted({0, *busy})} are taken; "
                "each must be different. Correct --machine_rank or --num_machines"
            )
        found = (
            list_differences([self._report, report]) if self._check_in != "off" else []
        )
        return rank, "the machines differ: " + "; ".join(found) if found else ""

    def _answer(
        self, rank: int, number: int, message: Mapping[str, Any], lines: TextIO
    ) -> None:
        with self._lock:
            guest = self._guests[rank]
            if guest.connection != number:
                raise ValueError("a newer connection has taken the place of this one")
            guest.notes, guest.seen = MachineNotes(**message), time.monotonic()
            found = self._run()
            if found.code is not None:
                self._told.add(rank)
        _write(lines, asdict(found))


# -- the other machines ------------------------------------------------------------------------------------------------
class MachineClient:
    """Another machine: keeps a connection to machine 0, and makes it anew when it is lost."""

    def __init__(
        self,
        meeting: Meeting,
        report: Report,
        token: bytes | None,
        say: Callable[[str], None],
    ) -> None:
        """Connect to machine 0. Raises: LaunchError when it does not respond in time, or refuses this machine."""
        self._meeting, self._report, self._token, self._say = (
            meeting,
            report,
            token,
            say,
        )
        self.rank = meeting.machine_rank or -1
        self.lighthouse = ""
        self._launcher = secrets.token_hex(8)
        self._own = MachineNotes()
        self._run = RunNotes()
        self._refused = ""
        self._heard = time.monotonic()
        self._there = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._keep_connected, name="hasten-machines", daemon=True
        )
        self._thread.start()
        place, patience_s = f"{meeting.address}:{meeting.port}", meeting.join_timeout_s
        self._there.wait(patience_s)
        if self._refused or not self._there.is_set():
            self._closed.set()
            raise LaunchError(
                f"machine 0 at {place} has refused this machine: {self._refused}."
                if self._refused
                else f"machine 0 does not respond at {place} for {patience_s:.0f} s, so this machine cannot join the run. Start the same command there "
                "with --machine_rank 0, check that the address is reachable, or raise --rdzv_conf join_timeout=SECONDS."
            )

    def exchange(self, notes: MachineNotes, stop: int | None) -> RunNotes:
        """Let the connection tell these facts; return the newest ones of all machines."""
        self._own = notes
        if self._refused:
            raise LaunchError(
                f"machine 0 has refused this machine after its connection was lost: {self._refused}."
            )
        return self._run

    @property
    def broken_s(self) -> float:
        """Seconds for which machine 0 has not responded; 0 while it does."""
        silent = time.monotonic() - self._heard
        return silent if silent > _SILENT_S else 0.0

    def close(self, code: int) -> None:
        """Tell the last facts, and close the connection."""
        self._closed.set()
        self._thread.join(_SILENT_S)

    def _keep_connected(self) -> None:
        while not self._closed.is_set() and not self._refused:
            # machine 0 is away: it is tried again
            with suppress(OSError, ValueError, KeyError, TypeError):
                self._talk()
            self._closed.wait(_EVERY_S)

    def _talk(self) -> None:
        address = (self._meeting.address, self._meeting.port)
        with (
            socket.create_connection(address, timeout=_SILENT_S) as connection,
            connection.makefile("rw", encoding="utf-8") as lines,
        ):
            connection.settimeout(_SILENT_S)
            nonce = _read(lines)["nonce"]
            rank = self.rank if self.rank >= 0 else None
            hello = {
                "proof": proof(self._token, nonce),
                "rank": rank,
                "launcher": self._launcher,
            }
            _write(lines, {**hello, "report": json.loads(self._report.encode())})
            connection.settimeout(max(_SILENT_S, self._meeting.join_timeout_s))
            welcome = _read(lines)
            if "refused" in welcome:
                self._refused = str(welcome["refused"])
                self._there.set()
                return
            connection.settimeout(_SILENT_S)
            self.rank, self.lighthouse = (
                int(welcome["rank"]),
                str(welcome["lighthouse"]),
            )
            if welcome["warning"]:
                self._say(str(welcome["warning"]))
            while True:
                last = self._closed.is_set()
                _write(lines, asdict(self._own))
                self._run = RunNotes(**_read(lines))
                self._heard = time.monotonic()
                self._there.set()
                if last:
                    return
                self._closed.wait(_EVERY_S)


def _write(lines: TextIO, message: Mapping[str, Any]) -> None:
    lines.write(json.dumps(message) + "\n")
    lines.flush()


def _read(lines: TextIO) -> Mapping[str, Any]:
    """Return the next message. Raises: EOFError, which is an OSError here, at the end of the connection."""
    line = lines.readline(_MOST_CHARS)
    if not line.endswith("\n"):
        raise ConnectionError("the connection was closed")
    message: Mapping[str, Any] = json.loads(line)
    return message
