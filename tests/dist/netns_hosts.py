"""Several hosts on one machine for tests: network namespaces joined by a bridge, each with its own host name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HostName:
    """One namespace that stands for a host."""

    namespace: str
    name: str
    address: str

    def start(self, argv: list[str], *, env: Mapping[str, str], cwd: Path) -> subprocess.Popen[str]:
        """Start a command on this host, its output joined and piped."""
        inner = ["unshare", "--uts", "sh", "-c", f'hostname {self.name}; exec "$@"', "sh", *argv]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *inner],
            env=dict(env),
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def kill(self) -> None:
        """Kill everything that runs on this host, as if its power went."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        for pid in listed.stdout.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:  # ended meanwhile
                continue

    def cut(self) -> None:
        """Take the host's network link down."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")


def why_not() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "the commands ip and unshare are not installed"
    probe = f"hasten-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    try:
        bridged = subprocess.run(
            ["ip", "-n", probe, "link", "add", "br0", "type", "bridge"], capture_output=True, text=True
        )
        return f"bridges cannot be made here: {bridged.stderr.strip()}" if bridged.returncode else ""
    finally:
        _ip("netns", "del", probe)


@contextmanager
def hosts(count: int) -> Iterator[list[HostName]]:
    """`count` hosts that reach each other; everything on them is killed at the end."""
    tag = f"hst{os.getpid()}"
    switch = f"{tag}-switch"
    made = [HostName(f"{tag}-{i}", f"host-{'abcdef'[i]}", f"10.77.0.{i + 1}") for i in range(count)]
    spaces = [switch, *(host.namespace for host in made)]
    try:
        for space in spaces:
            _ip("netns", "add", space)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for i, host in enumerate(made):
            _ip("-n", switch, "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _ip("-n", switch, "link", "set", f"port{i}", "master", "br0", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield made
    finally:
        for host in made:
            host.kill()
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
