"""A program in which processes save side by side, and are killed; run as a script, it prints what came of every save.

Each process saves again and again: into a folder of its own beside the other's, into the same folder, or into either
while a third process kills it at random. After every save that returned, the folder is locked and read to the last byte.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from hasten.checkpoint.base import Component, StateTree
from hasten.checkpoint.format.manifest import Manifest
from hasten.checkpoint.reader import open_checkpoint
from hasten.checkpoint.save import save_tree
from hasten.checkpoint.store.disk import Disk
from hasten.checkpoint.store.local_store import LocalStore, folder_lock
from hasten.comm.local import LocalComm

FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None
FILES = 12


def save(root: Path, name: str, number: int) -> None:
    """One save of several files, each of which says which save it belongs to."""
    tree = StateTree(
        {
            f"part{i}": Component({"w": torch.full((100,), number)}, None)
            for i in range(FILES)
        }
    )
    save_tree(
        LocalStore(root, threads=2), name, tree, Manifest(number=number), LocalComm()
    )


def number_in(root: Path, name: str) -> int | None:
    """The number of the save in a folder, after reading all of it; None when there is none."""
    if not (root / name).is_dir():
        return None
    with open_checkpoint(LocalStore(root), name, LocalComm()) as checkpoint:
        saved_tensors = [
            checkpoint.component(f"part{i}").pieces["w"][0].data for i in range(FILES)
        ]
        numbers = {
            int(value)
            for saved_tensor in saved_tensors
            for value in saved_tensor.tolist()
        } | {checkpoint.manifest.number}
    assert len(numbers) == 1, f"{name} mixes {numbers}"
    return numbers.pop()


def undisturbed_number(root: Path, name: str) -> int | None:
    """The same, while nobody may write there."""
    with folder_lock(root / name, Disk()):
        return number_in(root, name)


class Worker:
    """A process that saves until it is told to end, and writes a line about every save."""

    def __init__(
        self,
        index: int,
        scenario: str,
        root: Path,
        log: Path,
        until: float,
        serial: int,
    ) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            try:
                with log.open("ab", buffering=0) as out:
                    self._work(
                        index,
                        scenario,
                        root,
                        lambda *words: out.write((json.dumps(words) + "\n").encode()),
                        until,
                        serial,
                    )
            except BaseException as error:
                with log.open("ab", buffering=0) as out:
                    out.write(
                        (
                            json.dumps(["broken", f"{type(error).__name__}: {error}"])
                            + "\n"
                        ).encode()
                    )
            os._exit(0)

    def _work(
        self,
        index: int,
        scenario: str,
        root: Path,
        say: Callable[..., object],
        until: float,
        serial: int,
    ) -> None:
        rng, number = random.Random(serial), serial * 100_000
        while time.monotonic() < until:
            number += 1
            has_own_folder = scenario == "siblings" or (
                scenario == "kills" and rng.random() < 0.5
            )
            name = f"trial_{index}" if has_own_folder else "best"
            try:
                save(root, name, number)
            except Exception as error:  # every other reason is a fault
                say("broken", f"{type(error).__name__}: {error}")
                continue
            say("saved", name, number)
            number_on_disk = (
                number_in(root, name)
                if has_own_folder
                else undisturbed_number(root, name)
            )
            if number_on_disk != number if has_own_folder else number_on_disk is None:
                say("broken", f"{name} holds {number_on_disk} after {number} was saved")


def run(scenario: str, seconds: float, least: int) -> dict[str, object]:
    """What came of all saves of two processes side by side."""
    rng = random.Random(scenario)
    problems: list[str] = []
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        root, log = Path(folder) / "sweep", Path(folder) / "log"
        root.mkdir()
        log.touch()
        start_time, kills, serial = time.monotonic(), 0, 0
        while True:
            until = time.monotonic() + seconds
            workers = [
                Worker(i, scenario, root, log, until, serial := serial + 1)
                for i in range(2)
            ]
            while scenario == "kills" and time.monotonic() < until:
                time.sleep(rng.uniform(0.05, 0.4))
                index = rng.randrange(2)
                os.kill(workers[index].pid, signal.SIGKILL)
                os.waitpid(workers[index].pid, 0)
                kills += 1
                for name in ("best", f"trial_{index}"):
                    try:
                        if (root / name).is_dir():
                            undisturbed_number(root, name)
                    except Exception as error:
                        problems.append(
                            f"after a kill: {type(error).__name__}: {error}"
                        )
                workers[index] = Worker(
                    index, scenario, root, log, until, serial := serial + 1
                )
            for worker in workers:
                os.waitpid(worker.pid, 0)
            lines = [json.loads(line) for line in log.read_text().splitlines()]
            counts = Counter(line[0] for line in lines)
            if (
                counts["saved"] >= least
                or time.monotonic() - start_time > 10 * seconds + 60
            ):
                break
        problems += [line[1] for line in lines if line[0] == "broken"]
        for name in ("best", "trial_0", "trial_1"):
            save(root, name, 1)
        left = [path.name for path in root.rglob(".hasten*")]
        problems += [f"left behind: {left}"] if left else []
    return {
        "how": scenario,
        "counts": dict(counts),
        "kills": kills,
        "problems": problems[:20],
        "num_problems": len(problems),
    }


def main(seconds: float, least: int) -> None:
    torch.set_num_threads(1)
    json.dump(
        [run(scenario, seconds, least) for scenario in ("siblings", "same", "kills")],
        sys.stdout,
    )


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
