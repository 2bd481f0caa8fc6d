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

_MESSAGE_INTERVAL_S: Final = 0.2
"""Seconds between two messages of a machine."""
_SILENCE_TIMEOUT_S: Final = 3.0
"""Seconds without an answer after which a connection counts as lost and is made anew."""
_LAST_NEWS_S: Final = 3.0
"""Seconds in which the other machines are told the result of the run."""
_MAX_MESSAGE_CHARS: Final = 1 << 20


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

    def exchange_notes(self, notes: MachineNotes, stop: int | None) -> RunNotes:
        """Tell this machine's facts, and return the newest ones of all machines; does not wait."""
        ...

    @property
    def broken_s(self) -> float:
        """Seconds for which machine 0 has not responded; 0 while it does."""
        ...

    def close(self, code: int) -> None:
        """Leave; machine 0 tells the others the exit code of the run."""
        ...


def merge_notes(all_notes: Mapping[int, MachineNotes]) -> RunNotes:
    """Return the facts of all machines together; of several agreements, the latest one."""
    run_notes = RunNotes()
    for notes in all_notes.values():
        run_notes.joined += notes.joined
        run_notes.agreed = max(run_notes.agreed, notes.agreed, key=_step_of_agreement)
        run_notes.finished = run_notes.finished or notes.finished
        run_notes.running += notes.running
    run_notes.joined.sort()
    return run_notes


def _step_of_agreement(agreed: str) -> int:
    step_text = agreed.partition(" ")[0]
    return int(step_text) if step_text.isdecimal() else -1


def replicas_of_machine(
    num_replicas: int, num_machines: int, machine_rank: int
) -> range:
    """Return the numbers of the replicas on one machine; the first machines have one more where it does not divide evenly."""
    equal_share, num_larger = divmod(num_replicas, num_machines)
    first_replica = machine_rank * equal_share + min(machine_rank, num_larger)
    return range(
        first_replica, first_replica + equal_share + (machine_rank < num_larger)
    )


def prove_token(token: bytes | None, nonce: str) -> str:
    """Return the text that proves the knowledge of the job's token."""
    return hmac.new(
        token or b"", f"hasten machines {nonce}".encode(), "sha256"
    ).hexdigest()


# -- machine 0 ---------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _RemoteMachine:
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

    def __init__(self, lighthouse_address: str) -> None:
        self.lighthouse = lighthouse_address

    def exchange_notes(self, notes: MachineNotes, stop: int | None) -> RunNotes:
        """Return this machine's facts."""
        return RunNotes(notes.joined, notes.agreed, notes.finished, notes.running, stop)

    def close(self, exit_code: int) -> None:
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
        print_message: Callable[[str], None],
    ) -> None:
        self._meeting = meeting
        self._report = report
        self._check_in = check_in
        self._token = token
        self._say = print_message
        self.lighthouse = ""
        """Address of the lighthouse, which the other machines are told; they wait while it is empty."""
        self._own = MachineNotes()
        self._stop: int | None = None
        self._code: int | None = None
        self._machines: dict[int, _RemoteMachine] = {}
        self._informed_ranks: set[int] = set()
        self._connections = 0
        self._open: set[socket.socket] = set()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        try:
            address_family = socket.getaddrinfo(
                meeting.address, meeting.port, type=socket.SOCK_STREAM
            )[0][0]
            self._server = socket.create_server(
                (meeting.address, meeting.port), family=address_family, backlog=64
            )
        except OSError as error:
            raise LaunchError(
                f"machine 0 cannot listen at {meeting.address}:{meeting.port} ({error.strerror or error}), so the other machines could not find the "
                "run. Give --main_process_ip an address of this machine, and --main_process_port a free port."
            ) from error
        self._server.settimeout(_MESSAGE_INTERVAL_S)
        self._threads = [
            threading.Thread(
                target=self._accept_machines, name="hasten-machines", daemon=True
            )
        ]
        self._threads[0].start()

    def exchange_notes(self, notes: MachineNotes, stop: int | None) -> RunNotes:
        """Record this machine's facts; return the facts of all."""
        with self._lock:
            self._own = notes
            self._stop = stop
            return self._merge_live_notes()

    def _merge_live_notes(self) -> RunNotes:
        now_s = time.monotonic()
        all_notes = {0: self._own}
        num_silent = 0
        for rank, machine in self._machines.items():
            all_notes[rank] = machine.notes
            if now_s - machine.seen > _SILENCE_TIMEOUT_S:
                num_silent += machine.notes.running
        run_notes = merge_notes(all_notes)
        run_notes.running -= num_silent
        run_notes.stop = self._stop
        run_notes.code = self._code
        return run_notes

    def close(self, exit_code: int) -> None:
        """Tell all machines that respond the exit code of the run, then stop listening."""
        if self._closed.is_set():
            return
        with self._lock:
            self._code = exit_code
        deadline_s = time.monotonic() + _LAST_NEWS_S
        while time.monotonic() < deadline_s:
            with self._lock:
                responding_ranks = set()
                for rank, machine in self._machines.items():
                    if (
                        machine.connection
                        and time.monotonic() - machine.seen < _SILENCE_TIMEOUT_S
                    ):
                        responding_ranks.add(rank)
                if responding_ranks <= self._informed_ranks:
                    break
            time.sleep(_MESSAGE_INTERVAL_S / 4)
        self._closed.set()
        with self._lock:
            for connection in self._open:
                with suppress(OSError):  # closed by the other side
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_LAST_NEWS_S)
        self._server.close()

    def _accept_machines(self) -> None:
        while not self._closed.is_set():
            with suppress(TimeoutError):
                connection, _ = self._server.accept()
                thread = threading.Thread(
                    target=self._serve_machine,
                    args=(connection,),
                    name="hasten-machine",
                    daemon=True,
                )
                self._threads.append(thread)
                thread.start()

    def _serve_machine(self, connection: socket.socket) -> None:
        machine_rank = None
        connection_number = 0
        connection.settimeout(60.0)
        with self._lock:
            self._open.add(connection)
        # a stranger, or a machine that was lost
        lost_errors = suppress(OSError, ValueError, KeyError, TypeError)
        with (
            lost_errors,
            connection,
            connection.makefile("rw", encoding="utf-8") as message_stream,
        ):
            nonce = secrets.token_hex(16)
            _write_message(message_stream, {"nonce": nonce})
            machine_rank, connection_number = self._admit_machine(
                _read_message(message_stream), nonce, message_stream
            )
            while machine_rank is not None:
                self._answer_message(
                    machine_rank,
                    connection_number,
                    _read_message(message_stream),
                    message_stream,
                )
        with self._lock:
            self._open.discard(connection)
            if (
                machine_rank is not None
                and self._machines[machine_rank].connection == connection_number
            ):
                self._machines[
                    machine_rank
                    # its kernel has closed the connection: its replicas end with it
                ].notes = MachineNotes()
                self._machines[machine_rank].connection = 0
                if self._code is None:
                    self._say(
                        f"machine {machine_rank} ({self._machines[machine_rank].host}) has closed its connection; the others continue"
                    )

    def _admit_machine(
        self, hello_message: Mapping[str, Any], nonce: str, message_stream: TextIO
    ) -> tuple[int | None, int]:
        """Return the rank of a machine, and the number of its connection; None for one that is refused, which is told why."""
        if not hmac.compare_digest(
            str(hello_message["proof"]), prove_token(self._token, nonce)
        ):
            _write_message(
                message_stream,
                {
                    "refused": "it does not have the job's token; set the same HASTEN_TOKEN on all machines, or share the home folder"
                },
            )
            return None, 0
        report = Report.decode(json.dumps(hello_message["report"]))
        while not self.lighthouse and not self._closed.is_set():
            time.sleep(_MESSAGE_INTERVAL_S / 4)
        with self._lock:
            machine_rank, refusal_reason = self._rank_of(
                hello_message["rank"],
                report,
                launcher := str(hello_message["launcher"]),
            )
            if refusal_reason and (self._check_in == "error" or machine_rank is None):
                _write_message(message_stream, {"refused": refusal_reason})
                return None, 0
            assert machine_rank is not None, "a machine without a rank was refused"
            self._connections += 1
            known_machine = self._machines.get(machine_rank)
            connection_number = self._connections
            machine_notes = known_machine.notes if known_machine else MachineNotes()
            self._machines[machine_rank] = _RemoteMachine(
                report.host,
                launcher,
                machine_notes,
                time.monotonic(),
                connection_number,
            )
        self._say(
            f"machine {machine_rank} ({report.host}) is {'back' if known_machine else 'there'}"
        )
        _write_message(
            message_stream,
            {
                "rank": machine_rank,
                "lighthouse": self.lighthouse,
                "warning": refusal_reason,
            },
        )
        return machine_rank, connection_number

    def _rank_of(
        self, requested_rank: int | None, report: Report, launcher: str
    ) -> tuple[int | None, str]:
        """Return the rank of a machine and the reason to refuse it, empty for none."""
        num_machines = self._meeting.max_machines
        now_s = time.monotonic()
        busy_ranks = set()
        returning_ranks = []
        for known_rank, machine in self._machines.items():
            is_live = machine.connection and now_s - machine.seen < _SILENCE_TIMEOUT_S
            if is_live and machine.launcher != launcher:
                busy_ranks.add(known_rank)
            elif machine.host == report.host:
                returning_ranks.append(known_rank)
        rank = requested_rank
        if rank is None:
            free_ranks = set(range(1, num_machines)) - busy_ranks
            rank = min(returning_ranks or free_ranks, default=None)
        if rank is None or rank in busy_ranks or not 0 < rank < num_machines:
            return None, (
                f"{report.host} wants to be machine {'of any rank' if rank is None else rank} of {num_machines}, and the ranks {sorted({0, *busy_ranks})} are taken; "
                "each must be different. Correct --machine_rank or --num_machines"
            )
        if self._check_in == "off":
            return rank, ""
        differences = list_differences([self._report, report])
        if not differences:
            return rank, ""
        return rank, "the machines differ: " + "; ".join(differences)

    def _answer_message(
        self,
        rank: int,
        connection_number: int,
        message: Mapping[str, Any],
        message_stream: TextIO,
    ) -> None:
        with self._lock:
            machine = self._machines[rank]
            if machine.connection != connection_number:
                raise ValueError("a newer connection has taken the place of this one")
            machine.notes = MachineNotes(**message)
            machine.seen = time.monotonic()
            run_notes = self._merge_live_notes()
            if run_notes.code is not None:
                self._informed_ranks.add(rank)
        _write_message(message_stream, asdict(run_notes))


# -- the other machines ------------------------------------------------------------------------------------------------
class MachineClient:
    """Another machine: keeps a connection to machine 0, and makes it anew when it is lost."""

    def __init__(
        self,
        meeting: Meeting,
        report: Report,
        token: bytes | None,
        print_message: Callable[[str], None],
    ) -> None:
        """Connect to machine 0. Raises: LaunchError when it does not respond in time, or refuses this machine."""
        self._meeting = meeting
        self._report = report
        self._token = token
        self._say = print_message
        self.rank = meeting.machine_rank or -1
        self.lighthouse = ""
        self._launcher = secrets.token_hex(8)
        self._own = MachineNotes()
        self._run = RunNotes()
        self._refused = ""
        self._heard_at_s = time.monotonic()
        self._is_answered = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._keep_connected, name="hasten-machines", daemon=True
        )
        self._thread.start()
        server_address = f"{meeting.address}:{meeting.port}"
        patience_s = meeting.join_timeout_s
        self._is_answered.wait(patience_s)
        if self._refused or not self._is_answered.is_set():
            self._closed.set()
            if self._refused:
                raise LaunchError(
                    f"machine 0 at {server_address} has refused this machine: {self._refused}."
                )
            raise LaunchError(
                f"machine 0 does not respond at {server_address} for {patience_s:.0f} s, so this machine cannot join the run. Start the same command there "
                "with --machine_rank 0, check that the address is reachable, or raise --rdzv_conf join_timeout=SECONDS."
            )

    def exchange_notes(self, notes: MachineNotes, stop: int | None) -> RunNotes:
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
        silence_s = time.monotonic() - self._heard_at_s
        if silence_s > _SILENCE_TIMEOUT_S:
            return silence_s
        return 0.0

    def close(self, exit_code: int) -> None:
        """Tell the last facts, and close the connection."""
        self._closed.set()
        self._thread.join(_SILENCE_TIMEOUT_S)

    def _keep_connected(self) -> None:
        while not self._closed.is_set() and not self._refused:
            # machine 0 is away: it is tried again
            with suppress(OSError, ValueError, KeyError, TypeError):
                self._exchange_messages()
            self._closed.wait(_MESSAGE_INTERVAL_S)

    def _exchange_messages(self) -> None:
        server_address = (self._meeting.address, self._meeting.port)
        with (
            socket.create_connection(
                server_address, timeout=_SILENCE_TIMEOUT_S
            ) as connection,
            connection.makefile("rw", encoding="utf-8") as message_stream,
        ):
            connection.settimeout(_SILENCE_TIMEOUT_S)
            nonce = _read_message(message_stream)["nonce"]
            rank = self.rank if self.rank >= 0 else None
            hello_message = {
                "proof": prove_token(self._token, nonce),
                "rank": rank,
                "launcher": self._launcher,
            }
            _write_message(
                message_stream,
                {**hello_message, "report": json.loads(self._report.encode())},
            )
            connection.settimeout(max(_SILENCE_TIMEOUT_S, self._meeting.join_timeout_s))
            welcome_message = _read_message(message_stream)
            if "refused" in welcome_message:
                self._refused = str(welcome_message["refused"])
                self._is_answered.set()
                return
            connection.settimeout(_SILENCE_TIMEOUT_S)
            self.rank = int(welcome_message["rank"])
            self.lighthouse = str(welcome_message["lighthouse"])
            if welcome_message["warning"]:
                self._say(str(welcome_message["warning"]))
            while True:
                is_last_message = self._closed.is_set()
                _write_message(message_stream, asdict(self._own))
                self._run = RunNotes(**_read_message(message_stream))
                self._heard_at_s = time.monotonic()
                self._is_answered.set()
                if is_last_message:
                    return
                self._closed.wait(_MESSAGE_INTERVAL_S)


def _write_message(message_stream: TextIO, message: Mapping[str, Any]) -> None:
    message_stream.write(json.dumps(message) + "\n")
    message_stream.flush()


def _read_message(message_stream: TextIO) -> Mapping[str, Any]:
    """Return the next message. Raises: EOFError, which is an OSError here, at the end of the connection."""
    line = message_stream.readline(_MAX_MESSAGE_CHARS)
    if not line.endswith("\n"):
        raise ConnectionError("the connection was closed")
    message: Mapping[str, Any] = json.loads(line)
    return message
