"""A real SLURM of two nodes on this machine, for tests: run as `slurm_cluster.py FOLDER`, ends when its input ends.

Starts munged, slurmctld and two slurmd with the configuration `slurm.conf.txt` beside this file, prints `ready` when both nodes are
idle, and cancels all jobs and ends all daemons at the end of its input. Everything is written below FOLDER. The daemons see a hosts file of their
own, through a private mount namespace, in which the nodes' names resolve.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from string import Template
from typing import Final

TEMPLATE: Final = Path(__file__).with_name("slurm.conf.txt")
COMMANDS: Final = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scontrol",
    "scancel",
    "squeue",
)
CLONE_NEWNS: Final = 0x00020000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 1 << 18
MS_BIND: Final = 0x1000
PR_SET_PDEATHSIG: Final = 1
START_S: Final = 60.0
PATH: Final = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def missing() -> str | None:
    """Why no SLURM can be started here, or None."""
    absent = [name for name in COMMANDS if shutil.which(name, path=PATH) is None]
    if absent:
        return f"SLURM is not installed ({', '.join(absent)} not found); on Debian: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "a hosts file of its own for SLURM's nodes needs a mount namespace, which only root can make"
    return None


def own_hosts(folder: Path) -> None:
    """Let this process and its children resolve the nodes' names, without changing the machine's hosts file."""
    hosts = folder / "hosts"
    hosts.write_text(
        f"127.0.0.1 localhost {socket.gethostname()}\n127.0.0.1 node1 node2\n"
    )
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(CLONE_NEWNS)
        or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        or libc.mount(str(hosts).encode(), b"/etc/hosts", None, MS_BIND, None)
    ):
        raise OSError(
            ctypes.get_errno(),
            "cannot make a mount namespace with a hosts file of its own",
        )


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now."""
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
            for _ in range(count)
        ]
        return [int(s.getsockname()[1]) for s in sockets]


def configure(folder: Path) -> Path:
    """Write slurm.conf and the folders it names."""
    ports = free_ports(3)
    for name in ("state", "spool-node1", "spool-node2", "log"):
        (folder / name).mkdir(exist_ok=True)
    values = {
        "folder": str(folder),
        "host": socket.gethostname(),
        "user": getpass.getuser(),
        "controller_port": str(ports[0]),
        "port1": str(ports[1]),
        "port2": str(ports[2]),
        "cpus": str(os.cpu_count() or 1),
    }
    path = folder / "slurm.conf"
    path.write_text(Template(TEMPLATE.read_text()).substitute(values))
    return path


def end_with_parent() -> None:
    """Ask the kernel to end this daemon when its parent is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextlib.contextmanager
def daemon(*argv: str) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon in the foreground, ended on exit."""
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=end_with_parent)  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """The daemons, from the moment both nodes are idle."""
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    with ExitStack() as stack:
        stack.enter_context(
            daemon(
                "munged",
                "--foreground",
                "--force",
                f"--socket={folder}/munge.socket",
                f"--key-file={key}",
                f"--pid-file={folder}/munge.pid",
                f"--log-file={folder}/log/munged.log",
                f"--seed-file={folder}/munge.seed",
            )
        )
        wait_until(lambda: (folder / "munge.socket").exists(), "munged", folder)
        stack.enter_context(daemon("slurmctld", "-D"))
        for node in ("node1", "node2"):
            stack.enter_context(daemon("slurmd", "-D", "-N", node))
        wait_until(lambda: idle_nodes() == 2, "two idle nodes", folder)
        try:
            yield
        finally:
            command("scancel", "--me")
            command("scancel", "--me", "--signal=KILL", "--full")
            deadline = time.monotonic() + 10
            while command("squeue", "--noheader") and time.monotonic() < deadline:
                time.sleep(0.1)


def command(*argv: str) -> str:
    """What a SLURM command prints; nothing if it fails."""
    done = subprocess.run(argv, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else ""


def idle_nodes() -> int:
    """How many nodes wait for work."""
    return (
        command("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T")
        .split()
        .count("idle")
    )


def wait_until(condition: Callable[[], bool], awaited: str, folder: Path) -> None:
    """Return when `condition` holds; fail with the daemons' logs if it never does."""
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(
                f"== {p}\n{p.read_text()[-2000:]}"
                for p in sorted((folder / "log").iterdir())
            )
            raise TimeoutError(f"no {awaited} within {START_S:g} s\n{logs}")
        time.sleep(0.05)


def main() -> None:
    """Start, say so, and end with the input."""
    folder = Path(sys.argv[1]).absolute()
    os.environ["PATH"] = PATH
    own_hosts(folder)
    os.environ["SLURM_CONF"] = str(configure(folder))
    with cluster(folder):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
