"""Simulated hosts on one machine: network namespaces with launchers, to be killed and disconnected. Linux, as root."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hasten.runtime import env as environment

_CLONE_NEWNET: Final = 0x40000000
_CLONE_NEWUTS: Final = 0x04000000
_CLONE_NEWNS: Final = 0x00020000
_NOWHERE: Final = "02:00:00:00:00:ff"
"""Hardware address that no host has."""
_MS_BIND: Final = 0x1000
_MS_PRIVATE: Final = 0x44000  # and recursive

Zygote = subprocess.Popen[str]
"""Warm process that forks `hasten launch` for every line of its input."""


def ip(*words: str) -> None:
    """Run the command `ip` to change the network."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def why_impossible() -> str:
    """Return the reason why hosts cannot be created here; empty if they can."""
    probe = f"hasten-probe-{os.getpid()}"
    try:
        ip("netns", "add", probe)
        ip("-n", probe, "link", "add", "br0", "type", "bridge")
    except FileNotFoundError as error:
        return f"the command {error.filename} is not installed"
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    finally:
        subprocess.run(
            ["sh", "-c", f"command -v ip >/dev/null && ip netns del {probe}"],
            capture_output=True,
        )
    return ""


def enter(network: str, name: str = "") -> None:
    """Move this process into the network namespace at a path; with `name`, give it a separate host name there."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(network, os.O_RDONLY)
    if libc.setns(descriptor, _CLONE_NEWNET) or (name and libc.unshare(_CLONE_NEWUTS)):
        raise OSError(ctypes.get_errno(), "cannot enter the namespace")
    os.close(descriptor)
    if name:
        socket.sethostname(name)


def name_hosts(file: str) -> None:
    """Give this process and its children a separate /etc/hosts, in place of a cluster's DNS."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, _MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "cannot separate the mounts")
    if libc.mount(file.encode(), b"/etc/hosts", None, _MS_BIND, None):
        raise OSError(ctypes.get_errno(), "cannot mount the hosts file")


@dataclass(slots=True)
class NamespaceHost:
    """Network namespace that simulates a host."""

    namespace: str
    name: str
    address: str
    cable: tuple[str, str]
    """The namespace of the switch and its port."""

    @property
    def processes(self) -> list[int]:
        """All processes of this host."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True
        )
        return [int(pid) for pid in listed.stdout.split()]

    def kill(self) -> None:
        """Kill all processes of this host and delete its memory folder, as a power failure would."""
        pids = self.processes
        memories = {memory for pid in pids if (memory := _memory_of(pid))}
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # ended meanwhile
                continue
        for memory in memories:
            shutil.rmtree(memory, ignore_errors=True)

    def unplug(self) -> None:
        """Disconnect this host from the others without notice: packets are dropped."""
        ip("-n", self.cable[0], "link", "set", self.cable[1], "nomaster")

    def plug(self) -> None:
        """Connect this host again after `unplug`."""
        ip("-n", self.cable[0], "link", "set", self.cable[1], "master", "br0")

    def lose(self, other_host: NamespaceHost) -> None:
        """Drop all packets to another host without notice; the other hosts stay connected."""
        ip(
            "-n",
            self.namespace,
            "neigh",
            "replace",
            other_host.address,
            "lladdr",
            _NOWHERE,
            "dev",
            "eth0",
            "nud",
            "permanent",
        )

    def find(self, other_host: NamespaceHost) -> None:
        """Send packets to another host again after `lose`."""
        ip("-n", self.namespace, "neigh", "del", other_host.address, "dev", "eth0")


def _memory_of(pid: int) -> str:
    """Return the memory folder created by the launcher of a process."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next(
        (
            v.partition(b"=")[2].decode()
            for v in variables
            if v.startswith(b"HASTEN_MEMORY_FOLDER=")
        ),
        "",
    )


@contextmanager
def hosts(count: int) -> Iterator[list[NamespaceHost]]:
    """Context manager with `count` connected hosts; all their processes are killed at the end."""
    tag = f"hst{os.getpid()}"
    switch = f"{tag}-switch"
    created_hosts = [
        NamespaceHost(
            f"{tag}-{i}",
            f"host-{'abcdef'[i]}",
            f"10.77.0.{i + 1}",
            (switch, f"port{i}"),
        )
        for i in range(count)
    ]
    try:
        for space in (switch, *(host.namespace for host in created_hosts)):
            ip("netns", "add", space)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for i, host in enumerate(created_hosts):
            ip(
                "-n",
                switch,
                "link",
                "add",
                f"port{i}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                host.namespace,
            )
            ip("-n", switch, "link", "set", f"port{i}", "master", "br0", "up")
            ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            ip("-n", host.namespace, "link", "set", "eth0", "up")
            ip("-n", host.namespace, "link", "set", "lo", "up")
        yield created_hosts
    finally:
        for host in created_hosts:
            host.kill()
        for space in (switch, *(host.namespace for host in created_hosts)):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


@dataclass(slots=True)
class NamespaceMachine:
    """Host with its launcher."""

    zygote: Zygote
    host: NamespaceHost
    output: Path = Path()
    launcher: int = 0
    """The process that runs `hasten launch` on this host."""
    hosts_file: str = ""
    """File that the launcher sees as /etc/hosts, if not the system's."""

    @property
    def name(self) -> str:
        """The host's name."""
        return self.host.name

    @property
    def namespace(self) -> str:
        """The host's network namespace."""
        return self.host.namespace

    @property
    def processes(self) -> list[int]:
        """All processes of this host."""
        return self.host.processes

    def start(self, folder: Path, words: list[str], **variables: str) -> None:
        """Start `hasten launch` on this host."""
        self.output = folder / f"{self.name}-{time.monotonic_ns()}"
        argv = ["launch", "--cpu", *words]
        names = {
            "namespace": self.namespace,
            "host": self.name,
            "folder": str(folder),
            "output": str(self.output),
        }
        names["hosts_file"] = self.hosts_file
        assert self.zygote.stdin is not None
        assert self.zygote.stdout is not None
        self.zygote.stdin.write(
            json.dumps({**names, "argv": argv, "variables": variables}) + "\n"
        )
        self.zygote.stdin.flush()
        self.launcher = int(self.zygote.stdout.readline())

    @property
    def said(self) -> str:
        """Output of this host so far."""
        return self.output.read_text() if self.output.exists() else ""

    def wait_for(self, words: str, seconds: float = 240.0) -> None:
        """Block until these words were printed."""
        deadline = time.monotonic() + seconds
        while words not in self.said:
            assert time.monotonic() < deadline, (
                f"{self.name} never said {words!r}:\n{self.said}"
            )
            time.sleep(0.02)

    def end(self, seconds: float = 240.0) -> tuple[int, str]:
        """Wait for the launcher to end; returns its exit code and output."""
        code, deadline = Path(f"{self.output}.code"), time.monotonic() + seconds
        while not code.exists():
            assert time.monotonic() < deadline, f"{self.name} did not end:\n{self.said}"
            time.sleep(0.02)
        return int(code.read_text()), self.said

    def kill(self) -> None:
        """Kill all processes of this host and delete its memory folder, as a power failure would."""
        self.host.kill()

    def unplug(self) -> None:
        """Disconnect this host from the others."""
        self.host.unplug()


@contextmanager
def machines(zygote: Zygote, count: int) -> Iterator[list[NamespaceMachine]]:
    """Context manager with `count` hosts on which launchers can be started."""
    with hosts(count) as started_hosts:
        yield [NamespaceMachine(zygote, host) for host in started_hosts]


@contextmanager
def warm_launcher(script: Path, home: Path) -> Iterator[Zygote]:
    """Context manager with the process that forks launchers; `script` is its program, `home` the folder for hasten's files."""
    env = {
        **environment.snapshot(),
        "HASTEN_HOME": str(home),
        "HF_HOME": str(home),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=pipe, stdout=pipe, text=True, env=env
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def meet(count: int) -> list[str]:
    """Return the flags of every machine of a job."""
    return [
        f"--num_machines={count}",
        "--main_process_ip=10.77.0.1",
        "--main_process_port=29517",
    ]
