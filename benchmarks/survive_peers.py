"""The program of survive_kills.py under restarts from memory and from the disk, and in torchft's own pattern; run by survive_kills.py.

Restarts: one job of several processes (DDP), which the launcher starts again as a whole when one is killed; the state is copied to memory after every
update, or saved to the disk every ten updates. torchft: its Manager, DistributedDataParallel, Optimizer and DistributedSampler as its documentation
shows them, one process for each replica, each started again by this script when it was killed.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.survive.faults import FaultyNetwork, alive, lighthouse, rank_command
from tests.survive.replica_program import Numbered, model_of

WRAPPERS = ("DistributedDataParallel", "PureDistributedDataParallel")
"""torchft's two wrappers: the recommended one, and one that exchanges each gradient by itself."""
WORK_S = 0.006
"""Seconds that forward, backward and step take each, as in fault_program.py."""
LOCAL = "127.0.0.1"
SIZE = 100_000
SAVE_EVERY = 10
LIMIT_S = 180.0


def work(*_: object) -> None:
    """Take some milliseconds."""
    time.sleep(WORK_S)


class Updates:
    """The file in which a process writes its updates."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = (folder / f"updates-{name}-{os.getpid()}").open("a", buffering=1)

    def write(self, **values: object) -> None:
        """Write one line with the time."""
        self._file.write(json.dumps({**values, "time": time.time()}) + "\n")


def updates(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of all processes in the order of time."""
    found = []
    for path in folder.glob("updates-*"):
        _, name, pid = path.name.split("-")
        for line in path.read_text().splitlines():
            if line.endswith("}"):
                found.append(json.loads(line) | {"name": name, "pid": int(pid)})
    return sorted(found, key=lambda row: row["time"])


# -- the programs ------------------------------------------------------------------------------------------------------
class Progress:
    """The number of updates, as part of the checkpoint."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def restarting(folder: Path, source: str) -> None:
    """Train until killed, from the newest state."""
    from hasten import Accelerator

    every = 1 if source == "memory" else None
    accelerator = Accelerator(
        cpu=True,
        strategy="ddp",
        project_dir=str(folder / "project"),
        checkpoint_in_memory=every,
        project_config={"total_limit": 2},
    )
    model: Any = model_of(5)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(work)
    loader: Any = DataLoader(Numbered(SIZE), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    accelerator.load_state(must_exist=False)
    log = Updates(folder, str(accelerator.process_index))
    for x, y, _ in loader:
        work()
        loss = nn.functional.mse_loss(model(x), y)
        loss.register_hook(work)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        log.write(step=progress.step, committed=True, members=accelerator.num_processes)
        if source == "disk" and progress.step % SAVE_EVERY == 0:
            accelerator.save_state()


def of_torchft(folder: Path, name: str, replicas: int, wrapper: str, address: str) -> None:
    """Train until killed, as torchft's documentation shows it."""
    import torchft

    model = model_of(5)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inner.register_step_pre_hook(work)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = torch.distributed.TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"example_{name}",
        store_addr=LOCAL,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://{address}",
        hostname=LOCAL,
        timeout=timedelta(seconds=30),
    )
    wrapped = getattr(importlib.import_module("torchft.ddp"), wrapper)(manager, model)
    optimizer = torchft.Optimizer(manager, inner)
    data = Numbered(SIZE)
    sampler = torchft.DistributedSampler(
        data, replica_rank=int(name), num_replica_groups=replicas, group_rank=0, num_replicas=1, shuffle=True
    )
    log = Updates(folder, name)
    for x, y, _ in DataLoader(data, batch_size=4, sampler=sampler):
        optimizer.zero_grad()
        work()
        loss = nn.functional.mse_loss(wrapped(x), y)
        loss.register_hook(work)
        loss.backward()
        before = manager.current_step()
        optimizer.step()
        number = manager.num_participants()
        log.write(step=manager.current_step(), committed=manager.current_step() > before, members=number)


# -- kills -------------------------------------------------------------------------------------------------------------
class Job:
    """A job whose processes write their updates to a folder."""

    def __init__(self, folder: Path, replicas: int, tend: Callable[[], None] = lambda: None) -> None:
        self.folder, self.replicas = folder, replicas
        self._tend = tend
        """Called again and again, to start processes that have ended."""

    def _wait_until(self, condition: Callable[[list[dict[str, Any]]], object]) -> list[dict[str, Any]]:
        """Wait until the updates meet the condition, and return them. Raises: TimeoutError with the output of the processes."""
        until = time.monotonic() + LIMIT_S
        while not condition(rows := updates(self.folder)):
            self._tend()
            if time.monotonic() > until:
                text = "\n".join(path.read_text()[-2000:] for path in self.folder.glob("out*"))
                raise TimeoutError(f"nothing happened for {LIMIT_S:.0f} s:\n{text}")
            time.sleep(0.1)
        return rows

    def _members(self, rows: list[dict[str, Any]]) -> dict[str, int]:
        """Return the processes that have made an update of all replicas within the last second, by name."""
        now = time.time()
        whole = [
            row for row in rows if now - row["time"] < 1.0 and row["committed"] and row["members"] == self.replicas
        ]
        return {row["name"]: row["pid"] for row in whole if alive(row["pid"])}

    def kill(self, rng: random.Random) -> dict[str, Any]:
        """Kill one of the processes while all of them train; return the pause and the updates lost."""
        everybody = lambda rows: len(self._members(rows)) == self.replicas  # noqa: E731
        self._wait_until(everybody)
        time.sleep(1.0 + rng.random())
        found = self._members(self._wait_until(everybody))
        victim = found[rng.choice(sorted(found))]
        at = time.time()
        os.kill(victim, signal.SIGKILL)
        before = [row for row in updates(self.folder) if row["time"] <= at]
        reached = max(row["step"] for row in before if row["committed"])
        rows = self._wait_until(lambda rows: any(row["step"] > reached + 5 and row["committed"] for row in rows))
        pause, lost = pause_of(rows, at, reached)
        ended = sum(not alive(pid) for name, pid in found.items() if pid != victim)
        return {
            "replicas": self.replicas,
            "pause (s)": round(pause, 2),
            "updates lost": lost,
            "others that ended": ended,
        }


def pause_of(rows: list[dict[str, Any]], at: float, reached: int) -> tuple[float, int]:
    """Return the longest time without progress after a kill, and the number of updates that were made again or left out."""
    progress: list[float] = []
    newest = reached - 1
    for row in rows:
        if row["committed"] and newest < row["step"] <= reached + 6:
            newest = row["step"]
            progress.append(row["time"])
    known = {row["pid"] for row in rows if row["time"] <= at}
    again = [
        reached + 1 - row["step"]
        for row in rows
        if row["pid"] not in known and row["committed"] and row["time"] <= progress[-1]
    ]
    dropped = Counter(row["pid"] for row in rows if not row["committed"] and at < row["time"] <= progress[-1])
    return max(b - a for a, b in itertools.pairwise(progress)), max([0, *again]) + max([0, *dropped.values()])


def name_of(who: str) -> str:
    """Return the name of a contender in the table."""
    return f"torchft, {who}" if who in WRAPPERS else f"restart from {who}"


def restarts(
    source: str, replicas: int, kills: int, network: FaultyNetwork, rng: random.Random
) -> Iterator[dict[str, Any]]:
    """Kill processes of a job that restarts as a whole; yield a row for each kill."""
    with tempfile.TemporaryDirectory(prefix="hasten-restarts-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        command = [sys.executable, "-m", "hasten", "launch", "--cpu", "--num_processes", str(replicas)]
        command += ["--max_restarts", "1000", *rank_command(network.socket), __file__, "restarting", name, source]
        with (folder / "out.txt").open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        job = Job(folder, replicas)
        try:
            for _ in range(kills):
                yield job.kill(rng) | {"who": name_of(source)}
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for pid in {row["pid"] for row in updates(folder)}:
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)


class Replicas:
    """The processes of torchft's pattern, each of which is started again when it ends."""

    def __init__(self, folder: Path, replicas: int, wrapper: str, address: str, network: FaultyNetwork) -> None:
        self._folder = folder
        self._command = [*rank_command(network.socket)[2:], __file__, "torchft", str(folder)]
        self._last = [str(replicas), wrapper, address]
        self._processes = {str(number): self._start(str(number)) for number in range(replicas)}

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        error = str(self._folder / f"error-{name}")
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_ERROR_FILE": error}
        with (self._folder / f"out-{name}").open("a") as out:
            return subprocess.Popen(
                [*self._command, name, *self._last], stdout=out, stderr=subprocess.STDOUT, env=variables
            )

    def tend(self) -> None:
        """Start the processes that have ended again."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                self._processes[name] = self._start(name)

    def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.kill()  # its fork ends with it
            process.wait()


def torchft_kills(
    wrapper: str, replicas: int, kills: int, network: FaultyNetwork, rng: random.Random
) -> Iterator[dict[str, Any]]:
    """Kill replicas in torchft's own pattern; yield a row for each kill."""
    with (
        tempfile.TemporaryDirectory(prefix="torchft-", ignore_cleanup_errors=True) as text,
        lighthouse(None) as address,
    ):
        processes = Replicas(Path(text), replicas, wrapper, address, network)
        job = Job(Path(text), replicas, processes.tend)
        try:
            for _ in range(kills):
                yield job.kill(rng) | {"who": name_of(wrapper)}
        finally:
            processes.close()


def main() -> None:
    words = sys.argv[1:]
    match words[0]:
        case "restarting":
            restarting(Path(words[1]), words[2])
        case "torchft":
            of_torchft(Path(words[1]), words[2], int(words[3]), words[4], words[5])
        case other:
            sys.exit(f"{other!r} is no program; run survive_kills.py")


if __name__ == "__main__":
    main()
