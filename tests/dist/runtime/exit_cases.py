"""Ranks that end at different times: `exit_cases.py FILE` forks two ranks for each case, which end as a script does, and writes how.

FILE gets, by "case/rank": the exit code, and when the script was over, what runs at exit had run, and the process had ended.
What a rank prints to stderr goes to "case.rank.err" beside it.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import sys
import time
from contextlib import closing
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed.fsdp
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

import hasten.checkpoint.save  # noqa: F401 - loaded once, before the forks
from hasten import Accelerator

CASES = ("first_0", "first_1", "gone_0", "fails_0", "killed_1")


def free_port() -> int:
    """A port that nothing listens on now."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return int(server.getsockname()[1])


def train(case: str, rank: int, port: int) -> None:
    """A short training, and one way to end it."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    accelerator = Accelerator(cpu=True)
    accelerators = [Accelerator(cpu=True) for _ in range(2)]
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    for _ in range(2):
        accelerator.backward(model(torch.ones(8, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerators.append(accelerator)  # all of them live until the process ends
    globals()["kept"] = accelerators
    match case, rank:
        case ("first_1", 0):
            time.sleep(2)
        case ("gone_0", 1):
            _get_default_store().set("trained", "1")
            time.sleep(2)
        case ("fails_0", 1):
            time.sleep(4)
        case ("first_0", 0):
            _get_default_store().set("word", "said")
        case ("first_0", 1):
            time.sleep(2)
            assert _get_default_store().get("word") == b"said"
        case ("gone_0", 0):
            # what is sent to it last may be lost with the sender
            _get_default_store().get("trained")
            os._exit(0)
        case ("fails_0", 0):
            raise ValueError("on purpose")
        case ("killed_1", 1):
            os.kill(os.getpid(), signal.SIGKILL)


def wait(started: dict[int, tuple[str, int]]) -> dict[str, tuple[int, float]]:
    """The exit code of each fork, and when it had ended."""
    exits: dict[str, tuple[int, float]] = {}
    while len(exits) < len(started):
        pid, status = os.waitpid(-1, 0)
        case, rank = started[pid]
        exits[f"{case}/{rank}"] = (os.waitstatus_to_exitcode(status), time.monotonic())
    return exits


def note(path: Path) -> None:
    """Add the time to a file."""
    with path.open("a") as file:
        file.write(f"{time.monotonic()} ")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert Accelerator is not None  # loads it
    gc.freeze()  # memory that the forks share
    forks, out_folder = {}, Path(sys.argv[1])
    for name in CASES:
        meeting = free_port()
        for number in range(2):
            child = os.fork()
            if not child:
                times = out_folder.parent / f"{name}.{number}"
                os.dup2(os.open(f"{times}.err", os.O_WRONLY | os.O_CREAT), 2)
                # the last one to run, before the interpreter's own end
                atexit.register(note, times)
                try:
                    train(name, number, meeting)
                finally:
                    note(times)
                sys.exit()
            forks[child] = (name, number)
    exits = {}
    for key, (code, ended) in wait(forks).items():
        times = out_folder.parent / key.replace("/", ".")
        noted = (
            [float(word) for word in times.read_text().split()]
            if times.exists()
            else []
        )
        over, left = noted or (ended, ended)
        exits[key] = {"code": code, "over": over, "left": left, "ended": ended}
    out_folder.write_text(json.dumps(exits))
