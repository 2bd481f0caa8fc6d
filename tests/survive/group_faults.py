"""Faults that the ranks of replicas under test inflict on themselves, each in a chosen phase of an update."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from hasten.extensions.survive.exchange import Received, ReplicaGroup
from hasten.extensions.survive.replica import Replica
from tests.survive.reading import rows

PHASES: Final = ("forward", "backward", "exchange", "write", "step")
"""`exchange`: own gradients are sent, others not received; `write`: after the ranks of the replica have agreed on the exchange."""

Fault = tuple[str, int, str, str]
"""Replica, rank, phase and the name of the signal."""


class Faults:
    """The faults of a run, one after the other, each while all replicas train."""

    def __init__(
        self,
        folder: Path,
        faults: Sequence[Fault],
        replica: Replica,
        rank: int,
        replicas: int,
    ) -> None:
        self._folder, self._faults = folder, faults
        self._replica, self._rank, self._replicas = replica, rank, replicas
        self._number = self._since = 0

    def reached(self, phase: str) -> None:
        """Send the signal to this process if it is the next fault."""
        number = len(list(self._folder.glob("fault-*")))
        complete = (
            len(self._replica.contributors)
            == self._replicas
            == len(self._replica.ledger.members)
        )
        self._since = self._since + 1 if complete and number == self._number else 0
        self._number = number
        if number == len(self._faults) or self._since < 40:
            return
        name, rank, fault_phase, number_of_signal = self._faults[number]
        if (name, rank, fault_phase) == (self._replica.name, self._rank, phase):
            (self._folder / f"fault-{number}").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.Signals[number_of_signal])

    def watch(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Call `reached` in every phase but backward."""
        model.register_forward_pre_hook(lambda *_: self.reached("forward"))
        optimizer.register_step_pre_hook(lambda *_: self.reached("step"))
        self._before(ReplicaGroup, "receive_gradients", "exchange")
        self._before(Received, "write_means", "write")

    def in_backward(self, loss: Tensor) -> Tensor:
        """Return the loss, whose backward calls `reached`."""
        loss.register_hook(lambda _: self.reached("backward"))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return loss

    def _before(self, owner: type, name: str, phase: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)  # Any: of any type

        def called(*args: Any, **kwargs: Any) -> Any:
            self.reached(phase)
            return inner(*args, **kwargs)

        setattr(owner, name, called)


def end(
    run: subprocess.Popen[str], folder: Path, faults: int, replicas: int, limit_s: float
) -> int:
    """Let a run without a number of epochs end after its faults, when all replicas train again; return the number of its epochs."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until and run.poll() is None:
        time.sleep(0.5)
        if len(happened(folder)) < faults:
            continue
        since = max(path.stat().st_mtime for path in folder.glob("fault-*"))
        complete = [
            row
            for row in rows(folder)
            if len(row["contributors"]) == replicas and row["time"] > since + 5.0
        ]
        if len(complete) > 20:
            break
    number: int = max((row["epoch"] for row in rows(folder)), default=0) + 3
    (folder / "draft").write_text(str(number))
    (folder / "draft").rename(folder / "last")
    return number


def happened(folder: Path) -> dict[int, int]:
    """Return the process of each fault that has happened, by its number."""
    pid_texts = {
        int(path.name.removeprefix("fault-")): path.read_text()
        for path in folder.glob("fault-*")
    }
    return {number: int(pid) for number, pid in pid_texts.items() if pid}
