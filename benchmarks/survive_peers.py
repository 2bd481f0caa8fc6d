"""The program of survive_kills.py under restarts from memory and from the disk, and in torchft's own pattern; run by survive_kills.py.

Restarts: one job of several processes (DDP), which the launcher starts again as a whole when one is killed; the state is copied to memory after every
update, or saved to the disk every ten updates. torchft: its Manager, DistributedDataParallel, Optimizer and DistributedSampler as its documentation
shows them, one process for each replica, each started again by this script when it was killed.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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


def of_torchft(folder: Path, name: str, replicas: int, address: str) -> None:
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
    wrapped = torchft.DistributedDataParallel(manager, model)
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


# -- faults ------------------------------------------------------------------------------------------------------------
def wait_until(condition: Callable[[], object], process: Callable[[], str]) -> None:
    """Wait for the condition. Raises: TimeoutError with the output of the processes."""
    until = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"nothing happened for {LIMIT_S:.0f} s:\n{process()[-3000:]}")
        time.sleep(0.05)


def members(folder: Path, replicas: int) -> dict[str, int]:
    """Return the processes that have made an update of all replicas within the last second, by name."""
    found, rows = {}, updates(folder)
    for row in rows:
        if time.time() - row["time"] < 1.0 and row["committed"] and row["members"] == replicas and alive(row["pid"]):
            found[row["name"]] = row["pid"]
    return found


def pause_of(rows: list[dict[str, Any]], at: float, victim: int) -> tuple[float, int]:
    """Return the seconds without progress after a fault, and the number of updates that were lost by it."""
    before = [row for row in rows if row["time"] < at and row["committed"]]
    reached = max(row["step"] for row in before)
    after = [row for row in rows if row["time"] >= at and row["pid"] != victim]
    new = next(row for row in after if row["committed"] and row["step"] > reached)
    first = next(row for row in after if row["committed"])
    repeated = max(0, reached + 1 - first["step"])
    dropped = len({row["step"] for row in after if not row["committed"] and row["time"] <= new["time"]})
    return new["time"] - max(row["time"] for row in before), repeated + dropped


def restarts(
    source: str, replicas: int, faults: int, network: FaultyNetwork, rng: random.Random
) -> list[dict[str, Any]]:
    """Kill processes of a job that restarts as a whole; return a row for each kill."""
    with tempfile.TemporaryDirectory(prefix="hasten-restarts-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        command = [sys.executable, "-m", "hasten", "launch", "--cpu", "--num_processes", str(replicas)]
        command += ["--max_restarts", "1000", *rank_command(network.socket), __file__, "restarting", name, source]
        with (folder / "out.txt").open("w") as out:
            job = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return [one_kill(folder, replicas, rng) | {"who": source} for _ in range(faults)]
        finally:
            os.killpg(job.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                job.wait(10)
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
            for row in updates(folder):
                if alive(row["pid"]):
                    os.kill(row["pid"], signal.SIGKILL)


def one_kill(
    folder: Path, replicas: int, rng: random.Random, again: Callable[[str], None] = lambda name: None
) -> dict[str, Any]:
    """Kill one of the processes while all of them train; return the pause and the updates lost."""

    def out() -> str:
        return "\n".join(path.read_text() for path in folder.glob("out*"))

    wait_until(lambda: len(members(folder, replicas)) == replicas, out)
    time.sleep(1.0 + rng.random())
    found = members(folder, replicas)
    wait_until(lambda: len(members(folder, replicas)) == replicas, out)
    found = members(folder, replicas)
    name = rng.choice(sorted(found))
    at = time.time()
    os.kill(found[name], signal.SIGKILL)
    again(name)

    def continued() -> bool:
        reached = max(row["step"] for row in updates(folder) if row["time"] < at and row["committed"])
        return any(row["step"] > reached and row["committed"] and row["pid"] != found[name] for row in updates(folder))

    wait_until(continued, out)
    pause, lost = pause_of(updates(folder), at, found[name])
    return {"replicas": replicas, "kind": "kill", "pause (s)": round(pause, 2), "updates lost": lost}


def torchft_kills(
    replicas: int, faults: int, heartbeat_s: float, network: FaultyNetwork, rng: random.Random
) -> list[dict[str, Any]]:
    """Kill replicas in torchft's own pattern; return a row for each kill."""
    with tempfile.TemporaryDirectory(prefix="torchft-", ignore_cleanup_errors=True) as text:
        folder, processes = Path(text), {}
        with lighthouse(None, heartbeat_s=heartbeat_s) as address:

            def start(name: str) -> None:
                command = [
                    *rank_command(network.socket)[2:],
                    __file__,
                    "torchft",
                    text,
                    name,
                    str(replicas),
                    address,
                ]
                variables = {
                    **os.environ,
                    "GLOO_SOCKET_IFNAME": "lo",
                    "TORCHELASTIC_ERROR_FILE": str(folder / f"error-{name}"),
                }
                with (folder / f"out-{name}").open("a") as out:
                    processes[name] = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=variables)

            def again(name: str) -> None:
                processes[name].wait()
                start(name)

            try:
                for number in range(replicas):
                    start(str(number))
                return [
                    one_kill(folder, replicas, rng, again) | {"who": f"torchft, heartbeat {heartbeat_s:.0f} s"}
                    for _ in range(faults)
                ]
            finally:
                for process in processes.values():
                    process.kill()  # its fork ends with it
                    process.wait()


def steps_of(folder: Path) -> float:
    """Return the median seconds between two updates."""
    return statistics.median(b["time"] - a["time"] for a, b in itertools.pairwise(updates(folder)))


def main() -> None:
    words = sys.argv[1:]
    match words[0]:
        case "restarting":
            restarting(Path(words[1]), words[2])
        case "torchft":
            of_torchft(Path(words[1]), words[2], int(words[3]), words[4])
        case other:
            sys.exit(f"{other!r} is no program; run survive_kills.py")


if __name__ == "__main__":
    main()
