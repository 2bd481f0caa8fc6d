"""Rendezvous of a job's agents: a fixed set of machines, or torch's elastic set, both with a check-in. Imports torch.

The workers' store is new in every round and served by the agent of machine 0: restarted workers cannot read the addresses of dead
workers (as they can with torch's static rendezvous), and no other program can take the port between selection and use.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from hasten.errors import LaunchError
from hasten.launch import network
from hasten.launch.base import Meeting, Supervision
from hasten.launch.checkin import Report, check_agreement, gather_reports, rank_table
from hasten.launch.elastic.peers import MachineLost, Peers, PeerWatch
from hasten.runtime.store import join_store, serve_store

_OPERATION_TIMEOUT: Final = timedelta(seconds=30)
_SERVER_TIMEOUT: Final = timedelta(seconds=10)
_READERS_TIMEOUT_S: Final = 3.0


@dataclass(slots=True)
class CheckIn:
    """The exchange of reports at the start of every round."""

    report: Report
    supervision: Supervision
    say: Callable[[str], None]
    timeout_s: float
    seen: tuple[str, ...] = ()
    """Encoded reports of the last round."""

    def run(self, store: Store, machine_index: int, num_machines: int) -> list[Report]:
        """Return every machine's report, after comparing them and printing the rank table on machine 0.

        Raises: LaunchError on every machine when they differ or some are missing.
        """
        reports = gather_reports(
            store,
            machine_index,
            num_machines,
            self.report,
            timeout_s=self.timeout_s,
            report_waiting=self.say,
        )
        try:
            check_agreement(reports, self.supervision.expected_world_size)
        except LaunchError as error:
            if self.supervision.check_in == "error":
                raise
            if self.supervision.check_in == "warn" and machine_index == 0:
                self.say(f"warning: {error}")
        encoded_reports = tuple(report.encode() for report in reports)
        if (
            machine_index == 0
            and not self.supervision.quiet
            and encoded_reports != self.seen
        ):
            num_processes = sum(report.num_processes for report in reports)
            if num_machines == 1:
                machines_text = "1 machine"
            else:
                machines_text = f"{num_machines} machines"
            if num_processes == 1:
                processes_text = "1 process"
            else:
                processes_text = f"{num_processes} processes"
            self.say(f"{processes_text} on {machines_text}\n{rank_table(reports)}")
        self.seen = encoded_reports
        return reports


class FixedRendezvous(RendezvousHandler):
    """Rendezvous of a fixed number of machines; each keeps its rank across restarts."""

    def __init__(self, meeting: Meeting, check_in: CheckIn) -> None:
        self._meeting = meeting
        self._check_in = check_in
        self.round = -1
        """Number of restarts of the job."""
        self._server: TCPStore | None = None
        self._control: Store | None = None
        self._worker_store: TCPStore | None = None
        self._index = meeting.machine_rank
        self._hosting = False
        self._peers: Peers | None = None
        self._watch: PeerWatch | None = None

    @property
    def peers(self) -> Peers | None:
        """State of the other machines; None before the first round."""
        return self._peers

    @property
    def use_agent_store(self) -> bool:
        """True: the agent serves the workers' store."""
        return True

    def get_backend(self) -> str:
        """Return the name of this rendezvous backend."""
        return "hasten-fixed"

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round with all machines; a lost machine may rejoin, including machine 0."""
        self._stop_watch()
        while True:
            try:
                return self._join_round()
            except DistError as error:
                if self._hosting or not self._may_return:
                    raise
                self._check_in.say(
                    f"the connection to machine 0 is lost ({_first_line(error)}); waiting until it is restarted"
                )
                self._forget_machine_0()

    def _join_round(self) -> RendezvousInfo:
        control_store = self._connect_store()
        if self._index is None:
            self._index = self._find_index(control_store)
        control_store.set(self._rank_key(), str(self._index))
        self.round = self._next_round(control_store, self._index)
        control_store.add(f"arrivals/{self.round}", 1)
        round_store = PrefixStore(f"round/{self.round}", control_store)
        reports = self._agreed_reports(control_store, round_store, self._index)
        self._peers = Peers(
            control_store,
            self._index,
            tuple(report.host for report in reports),
            self.round,
        )
        self._start_watch(self._peers)
        address, port = self._serve_workers(round_store)
        return RendezvousInfo(
            round_store, self._index, len(reports), RendezvousStoreInfo(address, port)
        )

    def _next_round(self, control_store: Store, own_index: int) -> int:
        """Return the next round that this machine has not joined; a rejoining machine has joined earlier rounds."""
        round_number = self.round + 1
        local_report = self._check_in.report
        while control_store.check([f"round/{round_number}/report/{own_index}"]):
            stored_report = Report.decode(
                control_store.get(f"round/{round_number}/report/{own_index}")
            )
            has_begun = control_store.check(
                [
                    f"round/{round_number}/report/{machine_index}"
                    for machine_index in range(self._meeting.max_machines)
                ]
            )
            if not has_begun and (stored_report.host, stored_report.address) != (
                local_report.host,
                local_report.address,
            ):
                # two machines claim one rank at the start: the check-in reports it
                break
            round_number += 1
        return round_number

    @property
    def _may_return(self) -> bool:
        return self.round < self._check_in.supervision.max_restarts

    def _forget_machine_0(self) -> None:
        """Drop the connection to machine 0, which serves a new store when it returns; rounds restart at 0."""
        self._control = self._server = self._worker_store = self._peers = None
        self.round = -1

    def _rank_key(self) -> str:
        report = self._check_in.report
        return f"place/{report.host} {report.address}"

    def num_nodes_waiting(self) -> int:
        """Return the number of machines that wait to restart, as of the last poll; always 0 on a single machine.

        While restarts are left, a lost machine counts too: the others stop and wait for it in the next round.
        Raises: LaunchError when another machine failed, or stopped responding with no restarts left.
        """
        if self._watch is None:
            return 0
        try:
            return self._watch.num_waiting()
        except MachineLost as error:
            if not self._may_return:
                raise
            self._check_in.say(
                f"{error}. The processes are stopped until it is restarted"
            )
            return 1

    def wait_done(self) -> None:
        """Wait until the ranks of all machines have finished.

        Raises: as num_nodes_waiting.
        """
        if self._watch is not None:
            self._watch.wait_done()

    def is_closed(self) -> bool:
        """Return False: a fixed rendezvous never closes."""
        return False

    def set_closed(self) -> None:
        """Do nothing: the set of machines is fixed."""

    def get_run_id(self) -> str:
        """Return the run id of the job."""
        return self._meeting.run_id

    def shutdown(self) -> bool:
        """Stop the watch and release the stores."""
        self._stop_watch()
        self._peers = self._control = self._worker_store = self._server = None
        return True

    def _start_watch(self, peers: Peers) -> None:
        if self._meeting.alone:
            return
        endpoint = f"{self._meeting.address}:{self._meeting.port}"
        lost_message = (
            f"lost contact with machine 0 at {endpoint}: it ended, or the network is down. Check its output; the job cannot continue "
            "without it"
        )
        # a connection used only by the watch
        watch_store = PrefixStore(f"hasten/{self._meeting.run_id}", self._join_store())
        self._watch = PeerWatch(replace(peers, store=watch_store), lost_message)

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _connect_store(self) -> Store:
        if self._control is not None:
            return self._control
        meeting = self._meeting
        self._hosting = meeting.alone or meeting.machine_rank == 0
        if meeting.machine_rank is None and not meeting.alone:
            self._hosting = network.owns_address(meeting.address)
        self._server = self._host_store() if self._hosting else self._join_store()
        if self._hosting and self._index is None:
            self._index = 0
        self._server.set_timeout(_OPERATION_TIMEOUT)
        self._control = PrefixStore(f"hasten/{meeting.run_id}", self._server)
        # this machine is rejoining
        if self._index is None and self._control.check([self._rank_key()]):
            self._index = int(self._control.get(self._rank_key()))
        elif (
            self._index is not None
            and self._control.add(f"taken/{self._index}", 1) == 1
        ):
            self._control.add("placed", 1)
        return self._control

    def _host_store(self) -> TCPStore:
        meeting = self._meeting
        network.check_resolves(meeting.address)
        try:
            return serve_store(
                meeting.address, meeting.port, _SERVER_TIMEOUT, alone=meeting.alone
            )
        except (DistError, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                raise LaunchError(
                    f"port {meeting.port} on {meeting.address} is already in use, often by a run that is still running. "
                    f"Choose another with --main_process_port (0 picks a free one on a single machine)."
                ) from error
            raise LaunchError(
                f"machine 0 cannot be reached at {meeting.address}:{meeting.port} from itself ({_first_line(error)}): the address does "
                f"not belong to this machine (which has {network.address_towards(meeting.address)}), or --machine_rank 0 was given on "
                "the wrong machine. Run machine 0 at main_process_ip, and give every other machine a different --machine_rank."
            ) from error

    def _join_store(self) -> TCPStore:
        """Connect to machine 0, which may start later; log the wait."""
        meeting = self._meeting
        start_s = time.monotonic()
        next_report_s = 5.0
        name_hint = "; the name service does not know this name yet"
        endpoint_text = f"machine 0 at {meeting.address}:{meeting.port}"
        while not network.is_reachable(meeting.address, meeting.port):
            elapsed_s = time.monotonic() - start_s
            if elapsed_s > meeting.join_timeout_s:
                network.check_resolves(meeting.address)
                is_local_address = network.owns_address(
                    meeting.address
                ) and not network.is_loopback(meeting.address)
                if is_local_address:
                    rank_hint = f" This machine has that address, but was started with --machine_rank {meeting.machine_rank}."
                else:
                    rank_hint = ""
                raise LaunchError(
                    f"{endpoint_text} did not respond within {meeting.join_timeout_s:g} s.{rank_hint} Start the job there with --machine_rank 0, "
                    f"check main_process_ip, main_process_port and the firewall, or raise --rdzv_conf join_timeout=SECONDS."
                )
            if elapsed_s > next_report_s:
                wait_text = f"waiting for {endpoint_text} ({elapsed_s:.0f} s)"
                with suppress(LaunchError):
                    network.check_resolves(meeting.address)
                    name_hint = ""
                self._check_in.say(wait_text + name_hint)
                next_report_s *= 2
            time.sleep(0.1)
        try:
            return join_store(meeting.address, meeting.port, _OPERATION_TIMEOUT)
        except DistError as error:
            raise LaunchError(
                f"another program than machine 0 of a hasten job responds at {meeting.address}:{meeting.port} ({_first_line(error)}). "
                f"Check main_process_ip and main_process_port on every machine."
            ) from error

    def _find_index(self, control_store: Store) -> int:
        """Return this machine's rank if none was given: such machines take the free ranks in order of name."""
        num_machines = self._meeting.max_machines
        report = self._check_in.report
        machine_name = f"{report.host} {report.address} {time.time_ns()}"
        control_store.set(f"lobby/{control_store.add('lobby', 1) - 1}", machine_name)
        deadline_s = time.monotonic() + self._meeting.join_timeout_s
        while (
            control_store.add("lobby", 0) + control_store.add("placed", 0)
            < num_machines
        ):
            if time.monotonic() > deadline_s:
                num_present = control_store.add("lobby", 0) + control_store.add(
                    "placed", 0
                )
                raise LaunchError(
                    f"only {num_present} of {num_machines} machines arrived within {self._meeting.join_timeout_s:g} s. "
                    f"Start the same command on the others, or lower --num_machines."
                )
            time.sleep(0.05)
        machine_names = sorted(
            control_store.get(f"lobby/{index}").decode()
            for index in range(control_store.add("lobby", 0))
        )
        free_ranks = []
        for index in range(num_machines):
            if not control_store.add(f"taken/{index}", 0):
                free_ranks.append(index)
        if len(free_ranks) < len(machine_names):
            raise LaunchError(
                f"{control_store.add('placed', 0) + len(machine_names)} machines arrived, but {num_machines} were expected. Give each a different "
                f"--machine_rank from 0 to {num_machines - 1}, or give none."
            )
        return free_ranks[machine_names.index(machine_name)]

    def _agreed_reports(
        self, control_store: Store, store: Store, index: int
    ) -> list[Report]:
        """Return the reports of the check-in; if it fails, machine 0 serves it until all have read the reason."""
        try:
            return self._check_in.run(store, index, self._meeting.max_machines)
        except LaunchError:
            # of two machines that claim rank 0, one serves the store and may exit first
            with suppress(DistError):
                num_readers = control_store.add(f"heard/{self.round}", 1)
                deadline_s = time.monotonic() + _READERS_TIMEOUT_S
                while (
                    self._hosting
                    and num_readers < control_store.add(f"arrivals/{self.round}", 0)
                    and time.monotonic() < deadline_s
                ):
                    time.sleep(0.02)
                    num_readers = control_store.add(f"heard/{self.round}", 0)
            raise

    def _serve_workers(self, store: Store) -> tuple[str, int]:
        """Return address and port of this round's worker store: the requested port, or a new one after a restart."""
        if self._index == 0:
            assert self._server is not None, "machine 0 serves the store"
            if self.round > 0:
                self._worker_store = serve_store(
                    self._meeting.address, 0, _SERVER_TIMEOUT, alone=self._meeting.alone
                )
            port = (self._worker_store or self._server).port
            store.set("workers_meet", str(port))
        return self._meeting.address, int(store.get("workers_meet"))


class ElasticRendezvous(RendezvousHandler):
    """Torch's elastic rendezvous (machines may join and leave) with hasten's check-in and a new store in each round."""

    def __init__(self, inner: RendezvousHandler, check_in: CheckIn) -> None:
        self._inner = inner
        self._check_in = check_in
        self._worker_store: TCPStore | None = None
        self.round = -1
        """Number of restarts of the job: the highest count known to any machine."""

    @property
    def peers(self) -> Peers | None:
        """None: torch's keep-alive watches the other machines."""
        return None

    @property
    def use_agent_store(self) -> bool:
        """True: the agent serves the workers' store."""
        return True

    def get_backend(self) -> str:
        """Return the name of this rendezvous backend."""
        return self._inner.get_backend()

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round with the machines that are present."""
        rdzv_info = self._inner.next_rendezvous()
        round_store = PrefixStore("hasten", rdzv_info.store)
        round_store.set(f"round/{rdzv_info.rank}", str(self.round + 1))
        self._check_in.run(round_store, rdzv_info.rank, rdzv_info.world_size)
        self.round = max(
            int(round_store.get(f"round/{machine_index}"))
            for machine_index in range(rdzv_info.world_size)
        )
        address = self._check_in.report.address
        if rdzv_info.rank == 0:
            self._worker_store = serve_store(address, 0, _SERVER_TIMEOUT)
            round_store.set("workers_meet", f"{address} {self._worker_store.port}")
        address, port = round_store.get("workers_meet").decode().split()
        return RendezvousInfo(
            rdzv_info.store,
            rdzv_info.rank,
            rdzv_info.world_size,
            RendezvousStoreInfo(address, int(port)),
        )

    def num_nodes_waiting(self) -> int:
        """Return the number of machines that wait to join."""
        return self._inner.num_nodes_waiting()

    def is_closed(self) -> bool:
        """Return whether the rendezvous is closed."""
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        """Close the rendezvous for all machines."""
        self._inner.set_closed()  # type: ignore[no-untyped-call]  # torch leaves it so

    def get_run_id(self) -> str:
        """Return the run id of the job."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """Leave the rendezvous."""
        self._worker_store = None
        return bool(self._inner.shutdown())


def _first_line(error: BaseException) -> str:
    if str(error).strip():
        return str(error).strip().splitlines()[0][:200]
    return type(error).__name__


def with_address(report: Report, meeting: Meeting) -> Report:
    """Return the report with this machine's address as reachable by the others."""
    if meeting.alone:
        address = meeting.address
    else:
        address = network.address_for_others(meeting.address)
    return replace(report, address=address)
