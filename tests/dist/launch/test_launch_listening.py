"""Who can reach a job: a one-machine job listens on the loopback alone, and strangers on the network get nothing unpickled."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from torch.distributed import TCPStore

from hasten.cli.main import main
from hasten.launch.notebook import notebook_launcher

pytestmark = pytest.mark.timed

# Run by a rank: the addresses on which this rank, its peers and their launcher listen.
LISTEN: Final = """
import os, re, subprocess
def listening():
    launcher = os.getppid()
    family = {launcher, *map(int, open(f'/proc/{launcher}/task/{launcher}/children').read().split())}
    rows = subprocess.run(['ss', '-ltnpH'], capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted({r.split()[3] for r in rows if any(int(p) in family for p in re.findall('pid=([0-9]+)', r))})
"""


@pytest.fixture(scope="module", autouse=True)
def native_leftovers() -> None:
    """The first store of a process makes a pipe that its native library keeps forever: let it be made before we look."""
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and no settings file but the test's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HASTEN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    if shutil.which("ss") is None:
        pytest.skip("the command ss (iproute2) is not installed")
    return tmp_path


def loopback_only(text: str, least: int) -> None:
    """Fail unless the printed addresses are all of the loopback, and at least so many."""
    listings = re.findall(r"LISTENING (\[.*\])", text)
    assert listings, text
    for listing in listings:
        addresses = re.findall(r"'([^']+)'", listing)
        assert len(addresses) >= least, listing
        assert all(
            address.startswith(("127.0.0.1:", "[::1]:")) for address in addresses
        ), listing


def test_one_machine_listens_on_the_loopback_alone_also_after_a_restart(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "script.py").write_text(
        LISTEN
        + """
import sys, torch
from hasten import Accelerator
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(2, 2))  # gloo's sockets are made when first used
accelerator.backward(model(torch.ones(1, 2)).sum())
assert accelerator.gather_for_metrics([{"own": accelerator.process_index}], use_gather_object=True)
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    print('LISTENING', listening(), flush=True)
accelerator.wait_for_everyone()
if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':
    sys.exit(3)
"""
    )
    code = main(
        [
            "launch",
            "--cpu",
            "--num_processes=2",
            "--max_restarts=1",
            "--monitor_interval=0.1",
            "script.py",
        ]
    )
    captured = capfd.readouterr()
    assert code == 0, captured.err
    assert captured.out.count("LISTENING") == 2
    loopback_only(captured.out, least=3)  # the store, and gloo on two ranks


def _from_a_notebook() -> list[str]:
    names: dict[str, object] = {}
    exec(LISTEN, names)
    import torch.distributed as dist

    from hasten import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()
    assert dist.is_initialized()
    addresses: list[str] = names["listening"]()  # type: ignore[operator]  # defined by exec
    accelerator.wait_for_everyone()
    return addresses


@pytest.mark.exhaustive
def test_a_notebook_listens_on_the_loopback_alone(folder: Path) -> None:
    addresses = notebook_launcher(_from_a_notebook, num_processes=2, cpu=True)
    loopback_only(f"LISTENING {addresses}", least=3)


# ---------------------------------------------------------------- a real network, with a stranger on it

ADDRESS: Final = "10.78.0.{}"
PORT: Final = 29533


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def network() -> Iterator[list[str]]:
    """Three hosts as namespaces on one switch; skips with the reason where they cannot be made."""
    tag = f"hsl{os.getpid()}"
    switch, hosts = f"{tag}-s", [f"{tag}-{i}" for i in range(3)]
    try:
        try:
            for space in (switch, *hosts):
                ip("netns", "add", space)
            ip("-n", switch, "link", "add", "br0", "type", "bridge")
        except FileNotFoundError as error:
            pytest.skip(f"the command {error.filename} is not installed")
        except subprocess.CalledProcessError as error:
            pytest.skip(
                f"network namespaces cannot be made here: {error.stderr.strip()}"
            )
        ip("-n", switch, "link", "set", "br0", "up")
        for i, host in enumerate(hosts):
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
                host,
            )
            ip("-n", switch, "link", "set", f"port{i}", "master", "br0", "up")
            ip("-n", host, "addr", "add", f"{ADDRESS.format(i + 1)}/24", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield hosts
    finally:
        for space in (switch, *hosts):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


@dataclass(slots=True)
class Program:
    """A Python program on one host, and the file that holds what it prints."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def said(self) -> str:
        return self.output.read_text()

    def ended(self, seconds: float = 90.0) -> str:
        """What it printed until its end; it is killed if that does not come."""
        try:
            self.process.wait(seconds)
            return self.said
        except subprocess.TimeoutExpired:
            self.kill()
            return f"{self.said}\n(killed)"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def on(host: str, folder: Path, *words: str, **variables: str) -> Program:
    """Start a Python program on a host, with a home of its own unless one is given."""
    home = {
        "HASTEN_HOME": str(folder / f"home-{host}"),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }
    path = folder / f"{host}-{time.monotonic_ns()}.txt"
    command = ["ip", "netns", "exec", host, sys.executable, *words]
    with path.open("wb") as output:
        env = {**os.environ, **home, **variables}
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT
        )
    return Program(process, path)


def launch(
    host: str, folder: Path, machine: int, script: str, *flags: str, **variables: str
) -> Program:
    meeting = (
        f"--main_process_ip={ADDRESS.format(1)}",
        f"--main_process_port={PORT}",
        f"--machine_rank={machine}",
    )
    words = (
        "-m",
        "hasten.cli.main",
        "launch",
        "--cpu",
        "--check_in=off",
        *meeting,
        *flags,
        script,
    )
    return on(host, folder, *words, **variables)


VICTIM: Final = """
import time
from hasten import Accelerator
accelerator = Accelerator(cpu=True)
while True:
    accelerator.gather_for_metrics(['plain'], use_gather_object=True)
    print('ROUND', 'DONE', flush=True)
    time.sleep(0.1)
    if open('stop').read():
        break
    accelerator.wait_for_everyone()
"""

# A rank that follows the protocol, and sends code in place of an object.
IMPOSTOR: Final = """
import pickle
class Evil:
    def __reduce__(self):
        return open, ('pwned', 'w')
from hasten import Accelerator
from hasten.comm.encoding import Codec
accelerator = Accelerator(cpu=True)
accelerator.ctx.world.codec = Codec(pickle.dumps, lambda data: None)
accelerator.gather_for_metrics([Evil()], use_gather_object=True)
"""

# Writes code under every key that it can think of or list, again and again.
WRITER: Final = """
import base64, pickle, sys, time
from datetime import timedelta
from torch.distributed import TCPStore
class Evil:
    def __reduce__(self):
        return open, ('pwned', 'w')
evil = pickle.dumps(Evil())
deadline = time.monotonic() + float(sys.argv[2])
while time.monotonic() < deadline:
    try:
        store = TCPStore(sys.argv[1], int(sys.argv[3]), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
        break
    except Exception:
        time.sleep(0.1)
print('connected', flush=True)
keys = {f'{a}{b}' for a in ('', 'hasten/', 'hasten/0/', 'hasten/hasten/', '/worker/attempt_0/', 'hasten/hasten/round/0/')
        for b in ('0', '1', '0/1', '1/0', 'report/0', 'report/1', 'default_pg/0//0', 'default_pg/0//1', 'rank_0', 'workers_meet')}
while time.monotonic() < deadline:
    try:
        found = set(store.list_keys()) if hasattr(store, 'list_keys') else set()
        for key in keys | {k for k in found if 'init/' not in k}:
            store.set(key, evil)
        store.set('torch.rendezvous.hasten', base64.b64encode(evil))
    except Exception as error:
        print('lost', str(error)[:80], flush=True)
        break
    time.sleep(0.02)
"""


@pytest.mark.slow
@pytest.mark.timeout(230)
def test_a_stranger_in_the_place_of_a_machine_gets_nothing_unpickled(
    folder: Path, network: list[str]
) -> None:
    """The machine that should be second is late; a stranger who knows the command and the code takes its place."""
    (folder / "victim.py").write_text(VICTIM)
    (folder / "impostor.py").write_text(IMPOSTOR)
    (folder / "stop").write_text("1")
    victim = launch(network[0], folder, 0, "victim.py", "--num_machines=2")
    impostor = launch(network[2], folder, 1, "impostor.py", "--num_machines=2")
    victim_output = victim.ended()
    impostor.kill()
    assert not (folder / "pwned").exists(), victim_output
    assert "cannot be decoded" in victim_output
    assert "ROUND DONE" not in victim_output


@pytest.mark.slow
@pytest.mark.timeout(230)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--nnodes=2:3", "--max_restarts=0"), id="elastic"),
        pytest.param(("--num_machines=2",), id="fixed", marks=pytest.mark.exhaustive),
    ],
)
def test_a_stranger_who_writes_into_the_store_gets_nothing_unpickled(
    folder: Path, network: list[str], flags: tuple[str, ...]
) -> None:
    (folder / "victim.py").write_text(VICTIM)
    (folder / "writer.py").write_text(WRITER)
    (folder / "stop").write_text("")
    # a home folder that both machines mount: its secret is the token
    shared = {"HASTEN_HOME": str(folder / "home")}
    address = ADDRESS.format(1)
    writer = on(network[2], folder, "writer.py", address, "60", str(PORT))
    members = [
        launch(network[i], folder, i, "victim.py", *flags, **shared) for i in (0, 1)
    ]
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and any(
        member.process.poll() is None for member in members
    ):
        if "connected" in writer.said and members[0].said.count("ROUND DONE") >= 5:
            break
        time.sleep(0.1)
    (folder / "stop").write_text("1")
    outputs = [member.ended(45) for member in members]
    writer.kill()
    # the interface where machines meet is open to the network
    assert "connected" in writer.said
    assert not (folder / "pwned").exists(), outputs


@pytest.mark.slow
@pytest.mark.timeout(230)
@pytest.mark.exhaustive
def test_many_machines_listen_on_the_interface_where_they_meet(
    folder: Path, network: list[str]
) -> None:
    script = LISTEN + VICTIM.replace(
        "while True:", "print('LISTENING', listening(), flush=True)\nwhile True:"
    )
    (folder / "victim.py").write_text(script)
    (folder / "stop").write_text("1")
    shared = {"HASTEN_HOME": str(folder / "home")}
    for flags in (("--num_machines=2",), ("--nnodes=2:3",)):
        members = [
            launch(network[i], folder, i, "victim.py", *flags, **shared) for i in (0, 1)
        ]
        for i, member in enumerate(members):
            text = member.ended()
            assert "ROUND DONE" in text, text
            addresses = re.findall(
                r"'([^']+)'", re.findall(r"LISTENING (\[.*\])", text)[0]
            )
            machine_address = ADDRESS.format(i + 1)
            assert addresses
            assert all(
                a.startswith(
                    (
                        f"{machine_address}:",
                        "127.0.0.1:",
                        f"[::ffff:{machine_address}]:",
                    )
                )
                for a in addresses
            ), addresses
