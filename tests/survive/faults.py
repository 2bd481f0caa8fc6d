"""Injection of faults into a run of replicas on simulated hosts: processes killed or stopped, links cut, each in a chosen phase."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tests.support.machines import NamespaceHost, hosts, ip
from tests.survive.driving import DEFAULTS, SURVIVE_TESTS, finish, search_path
from tests.survive.fault_program import PHASES, read_phase

SUPPORT: Final = SURVIVE_TESTS.parent / "support"
LIGHTHOUSE: Final = "10.77.0.254"
KINDS: Final = ("kill", "stop", "cut")
LENGTHS: Final[Mapping[str, tuple[float, ...]]] = {
    "kill": (0.0,),
    "stop": (0.3, 1.5, 5.0),
    "cut": (0.3, 1.5, 5.0, 15.0),
}
"""Seconds after which a stopped process continues, or a cut link is connected again."""
NEVER: Final = -1.0
FAULT_OPTIONS: Final = {**DEFAULTS, "sleep": 0.006, "save_every": 10, "network": ""}
STALL_S: Final = 180.0
"""Seconds without all replicas in training after which a run counts as failed."""


class StalledRunError(Exception):
    """A run in which replicas did not return to training."""


@dataclass(slots=True)
class Fault:
    """One fault: planned by kind, phase and length; the other values are those of its injection."""

    kind: str
    phase: str
    """The phase to wait for."""
    seconds: float
    """Time until the process continues or the link is connected again; `NEVER` for none."""
    follows_s: float | None = None
    """Seconds after the previous fault, while its replica is still away; None waits until all replicas train."""
    pair: bool = False
    """True cuts the link to one other replica alone."""
    at: float = 0.0
    name: str = ""
    other: str = ""
    hit: str = ""
    """The phase in which the replica was."""
    until: float = 0.0
    pid: int = 0


def plan_faults(
    replicas: int, deck: list[tuple[str, str]], rng: random.Random
) -> list[Fault]:
    """Return faults of these kinds and phases, some of which follow before the replica of the previous one is back."""
    faults: list[Fault] = []
    for kind, phase in deck:
        fault = Fault(kind, phase, rng.choice(LENGTHS[kind]))
        fault.pair = kind == "cut" and rng.random() < 0.2
        if (
            faults
            and faults[-1].follows_s is None
            and replicas > 2
            and rng.random() < 0.3
        ):
            fault.follows_s = rng.random() * 3.0
        faults.append(fault)
    if faults[-1].kind != "kill" and not faults[-1].pair and rng.random() < 0.5:
        faults[-1].seconds = NEVER
    return faults


def decks(rng: random.Random, size: int) -> Iterator[list[tuple[str, str]]]:
    """Yield decks of kinds and phases without end; each pair comes equally often."""
    while True:
        pairs = [(kind, phase) for kind in KINDS for phase in PHASES]
        rng.shuffle(pairs)
        for start in range(0, len(pairs), size):
            yield pairs[start : start + size]


# -- the hosts ---------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class FaultyNetwork:
    """Simulated hosts for replicas, a lighthouse that all of them reach, and warm processes."""

    made: list[NamespaceHost]
    socket: Path
    prefix: str

    def cut(self, fault: Fault) -> None:
        """Cut the link of a replica, or its link to one other."""
        if not fault.pair:
            self.made[int(fault.name)].unplug()
            return
        first_host, second_host = (
            self.made[int(fault.name)],
            self.made[int(fault.other)],
        )
        first_host.lose(second_host)
        second_host.lose(first_host)

    def connect(self, fault: Fault) -> None:
        """Undo `cut`."""
        if not fault.pair:
            self.made[int(fault.name)].plug()
            return
        first_host, second_host = (
            self.made[int(fault.name)],
            self.made[int(fault.other)],
        )
        first_host.find(second_host)
        second_host.find(first_host)


@contextmanager
def faulty_network(
    folder: Path, count: int, modules: Sequence[str] = ("torchft.coordination",)
) -> Iterator[FaultyNetwork]:
    """Context manager with `count` hosts for replicas, and with processes in which torch is loaded."""
    with ExitStack() as stack:
        replica_hosts = stack.enter_context(hosts(count))
        switch = replica_hosts[0].cable[0]
        ip("-n", switch, "addr", "add", f"{LIGHTHOUSE}/24", "dev", "br0")
        ip("-n", switch, "link", "set", "lo", "up")
        path = folder / "socket"
        stack.enter_context(warm_ranks(path, modules))
        yield FaultyNetwork(
            replica_hosts, path, replica_hosts[0].namespace.rpartition("-")[0]
        )


@contextmanager
def warm_ranks(path: Path, modules: Sequence[str]) -> Iterator[None]:
    """Context manager with the process that forks ranks in which torch is loaded."""
    command = [
        sys.executable,
        str(SUPPORT / "rank_zygote.py"),
        "serve",
        str(path),
        *modules,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": search_path()}
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        try:
            yield
        finally:
            server.kill()


def rank_command(path: Path) -> list[str]:
    """Return the launcher's arguments that start a rank as a fork of the warm process."""
    return [
        "--no_python",
        "--",
        sys.executable,
        "-S",
        str(SUPPORT / "rank_zygote.py"),
        "rank",
        str(path),
    ]


@contextmanager
def lighthouse(
    network: FaultyNetwork | None, *, join_s: float = 10.0, heartbeat_s: float = 2.0
) -> Iterator[str]:
    """Context manager with torchft's lighthouse, on a host that all replicas reach, or without a network on this machine; yields its address."""
    host = LIGHTHOUSE if network else "127.0.0.1"
    command = ["ip", "netns", "exec", network.made[0].cable[0]] if network else []
    command += [
        sys.executable,
        "-m",
        "hasten.extensions.survive.lighthouse",
        host,
        "1",
        str(join_s),
        str(heartbeat_s),
    ]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        port = child.stdout.readline().decode().strip()
        assert port.isdecimal(), f"the lighthouse printed {port!r}"
        try:
            yield f"{host}:{port}"
        finally:
            child.stdin.close()


# -- the run -----------------------------------------------------------------------------------------------------------
class FaultyRun:
    """A run of replicas, seen from outside: its processes, their phases, and the faults injected so far."""

    def __init__(
        self, folder: Path, replicas: int, network: FaultyNetwork, rng: random.Random
    ) -> None:
        self.folder, self.replicas, self._network, self._rng = (
            folder,
            replicas,
            network,
            rng,
        )
        self.faults: list[Fault] = []
        self._undone: list[Fault] = []
        self._changed = 0.0
        self.process: subprocess.Popen[str]

    def start(self, options: Mapping[str, Any], address: str, *flags: str) -> None:
        """Start the launcher."""
        command = [
            sys.executable,
            "-m",
            "hasten",
            "launch",
            "--cpu",
            "--replicas",
            str(self.replicas),
        ]
        command += [
            "--survive_lighthouse",
            address,
            "--survive_hang_timeout_s",
            "60",
            *flags,
        ]
        command += rank_command(self._network.socket)
        command += [
            str(SURVIVE_TESTS / "fault_program.py"),
            str(self.folder),
            json.dumps(options),
        ]
        variables = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "eth0",
            "PYTHONPATH": search_path(),
        }
        with (self.folder / "out.txt").open("w") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env=variables,
            )

    def training(self) -> dict[str, int]:
        """Return the replicas that are alive, connected and have made an update since the last fault, and within the last second."""
        away = {name for fault in self._undone for name in (fault.name, fault.other)}
        pids_by_name: dict[str, int] = {}
        for path in self.folder.glob("replica-*.jsonl"):
            name, pid = path.stem.split("-")[1:]
            with suppress(OSError):
                written = path.stat().st_mtime if path.stat().st_size else 0.0
                if (
                    name not in away
                    and written > max(self._changed, time.time() - 1.0)
                    and alive(int(pid))
                ):
                    pids_by_name[name] = int(pid)
        return pids_by_name

    def wait_for(self, number: int) -> dict[str, int]:
        """Wait until this many replicas train. Raises: StalledRunError."""
        until = time.monotonic() + STALL_S
        while len(replicas_training := self.training()) < number:
            self.undo()
            if self.process.poll() is not None:
                raise StalledRunError(
                    f"the run has ended with {self.process.returncode}"
                )
            if time.monotonic() > until:
                raise StalledRunError(
                    f"after {STALL_S:.0f} s {sorted(replicas_training)} train, and {number} are wanted"
                )
            time.sleep(0.01)
        return replicas_training

    def inject(self, fault: Fault) -> None:
        """Inject a fault: wait for its phase, then disturb the replica."""
        if fault.follows_s is None:
            while self._undone:
                self.undo()
                time.sleep(0.01)
            replicas_training = self.wait_for(self.replicas)
        else:
            self._pause(fault.follows_s)
            replicas_training = self.wait_for(2)
        fault.name = self._victim(replicas_training, fault)
        if fault.pair:
            fault.other = self._rng.choice(
                sorted(set(replicas_training) - {fault.name})
            )
        fault.pid = replicas_training[fault.name]
        path = self.folder / f"phase-{fault.name}-{fault.pid}"
        until = time.monotonic() + 20.0
        while (
            read_phase(path)[0] != fault.phase
            and time.monotonic() < until
            and alive(fault.pid)
        ):
            time.sleep(0.0002)
        time.sleep(self._rng.random() * 0.004)
        self._disturb(fault, path)
        self.faults.append(fault)

    def _victim(self, replicas_training: Mapping[str, int], fault: Fault) -> str:
        if fault.phase == "save":  # one replica saves for all
            for name, pid in replicas_training.items():
                if read_phase(self.folder / f"phase-{name}-{pid}")[1]:
                    return name
        return self._rng.choice(sorted(replicas_training))

    def _disturb(self, fault: Fault, path: Path) -> None:
        fault.at = time.time()
        if fault.kind == "cut":
            fault.hit = read_phase(path)[0]
            self._network.cut(fault)
        else:
            with suppress(ProcessLookupError):
                os.kill(
                    fault.pid,
                    signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP,
                )
            _settled(fault.pid)
            fault.hit = read_phase(path)[0]
        self._changed = time.time()
        if fault.kind != "kill":
            fault.until = (
                time.monotonic() + fault.seconds
                if fault.seconds != NEVER
                else float("inf")
            )
            self._undone.append(fault)

    def undo(self, everything: bool = False) -> None:
        """Continue the processes and connect the links whose time has come."""
        current_time = time.monotonic()
        for fault in [
            undone_fault
            for undone_fault in self._undone
            if everything or undone_fault.until < current_time
        ]:
            self._undone.remove(fault)
            self._changed = time.time()
            if fault.kind == "cut":
                self._network.connect(fault)
            else:
                with suppress(ProcessLookupError):
                    os.kill(fault.pid, signal.SIGCONT)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.undo()
            time.sleep(0.005)

    def finish(self, timeout_s: float) -> int:
        """Let the run end after two further epochs; return the number of epochs.

        Faults that are never undone stay until a replica has finished the run.
        """
        while any(fault.seconds != NEVER for fault in self._undone):
            self.undo()
            time.sleep(0.01)
        missing = len({fault.name for fault in self._undone})
        self.wait_for(self.replicas - missing)
        last = 3 + max(_epoch(path) for path in self.folder.glob("replica-*.jsonl"))
        draft = self.folder / "last.draft"
        draft.write_text(str(last))
        draft.rename(self.folder / "last")
        try:
            until = time.monotonic() + timeout_s
            while (
                self.process.poll() is None
                and len(list(self.folder.glob("result-*"))) < self.replicas - missing
            ):
                if time.monotonic() > until:
                    break
                time.sleep(0.02)
            for fault in self._undone:
                with suppress(ProcessLookupError):  # it never continues
                    os.kill(fault.pid, signal.SIGKILL)
            finish(self.process, self.folder, timeout_s)
        finally:
            self.undo(everything=True)
        return last

    def close(self) -> None:
        """End all processes of the run, and connect all links."""
        self.undo(everything=True)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        for path in self.folder.glob("phase-*"):
            pid = int(path.name.rpartition("-")[2])
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Return True if the process exists and is no zombie."""
    return _status(pid) not in ("", "Z", "X")


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _settled(pid: int) -> None:
    """Wait until the process has stopped or ended, so that its phase stays as it is."""
    until = time.monotonic() + 5.0
    while _status(pid) not in ("T", "Z", "X", "") and time.monotonic() < until:
        time.sleep(0.0005)


def _epoch(path: Path) -> int:
    lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
    return int(json.loads(lines[-1])["epoch"]) if lines else 0


def run_with_faults(
    folder: Path,
    replicas: int,
    network: FaultyNetwork,
    faults: Sequence[Fault],
    rng: random.Random,
    timeout_s: float = 200.0,
) -> tuple[dict[str, Any], list[Fault]]:
    """Run replicas, inject the faults, and wait for the end; return the options of the run, and the faults as they were injected.

    Raises: StalledRunError, AssertionError when the run ended or did not continue.
    """
    options: dict[str, Any] = {
        **FAULT_OPTIONS,
        "size": 4 * replicas * 25 + 2,
        "network": network.prefix,
    }
    with lighthouse(network) as address:
        run = FaultyRun(folder, replicas, network, rng)
        run.start(options, address)
        try:
            for fault in faults:
                run.inject(fault)
            options["epochs"] = run.finish(timeout_s)
        finally:
            run.close()
    return options, run.faults


def encoded(fault: Fault) -> dict[str, Any]:
    """Return the fault as JSON values."""
    fields = asdict(fault)
    fields["until"] = 0.0
    return fields
