"""Checks of `notebook_launcher`, to be run where it may start processes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import accelerate
from accelerate._impl.views.state import PartialState

# Any in this file: options of the launcher.
NUM_PROCESSES = int(os.environ.get("ACCELERATE_NUM_PROCESSES", "1"))


def basic_function() -> None:
    print(f"PartialState:\n{PartialState()}")  # noqa: T201  a script's own output


def tough_nut_function(queue: str) -> None:
    """Fail until the folder `queue` is empty; each call takes one file out of it."""
    left = sorted(Path(queue).iterdir())
    if left:
        left[0].unlink(missing_ok=True)
        raise RuntimeError("the nut has not been cracked yet")
    print(f"PartialState:\n{PartialState()}")  # noqa: T201  a script's own output


def bipolar_sleep_function(sleep_sec: int) -> None:
    if PartialState().process_index == 0:
        raise RuntimeError("the first process fails at once")
    time.sleep(sleep_sec)


def assert_clean_cuda_fork_function() -> None:
    """Raise where CUDA was initialised before the process began."""
    is_initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's own
    assert not is_initialized, "CUDA was initialised by the parent"


def _make_check(
    description: str, function: Callable[[], None], **options: Any
) -> Callable[[], None]:
    def run() -> None:
        accelerate.notebook_launcher(
            function, (), num_processes=NUM_PROCESSES, **options
        )

    run.__doc__ = description
    return run


test_can_initialize = _make_check("Check that processes start.", basic_function)
test_static_rdzv_backend = _make_check(
    "Check the rendezvous without a server.", basic_function, rdzv_backend="static"
)
test_c10d_rdzv_backend = _make_check(
    "Check the rendezvous of torch.", basic_function, rdzv_backend="c10d"
)
test_clean_cuda_fork = _make_check(
    "Check that processes begin without CUDA.", assert_clean_cuda_fork_function
)
test_problematic_imports = _make_check(
    "Check that a notebook's imports do not matter: nothing is forked.", basic_function
)


def test_fault_tolerant(max_restarts: int = 3) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number in range(max_restarts):
            Path(folder, str(number)).touch()
        accelerate.notebook_launcher(
            tough_nut_function,
            (folder,),
            num_processes=NUM_PROCESSES,
            rdzv_backend="c10d",
            max_restarts=max_restarts,
        )


def test_monitoring(monitor_interval: float = 0.01, sleep_sec: int = 100) -> None:
    """Check that a failure of one process ends the others soon."""
    started = time.monotonic()
    try:
        accelerate.notebook_launcher(
            bipolar_sleep_function,
            (sleep_sec,),
            num_processes=NUM_PROCESSES,
            monitor_interval=monitor_interval,
        )
    # of the launcher or of the child: what counts is how soon it came
    except Exception as error:
        assert (
            "fails at once" in str(error) or time.monotonic() - started < sleep_sec
        ), error
    assert time.monotonic() - started < sleep_sec, "the others were not stopped"


def main() -> None:
    for check in (
        test_can_initialize,
        test_static_rdzv_backend,
        test_c10d_rdzv_backend,
        test_clean_cuda_fork,
    ):
        check()
    if NUM_PROCESSES > 1:
        test_fault_tolerant()
        test_monitoring()
