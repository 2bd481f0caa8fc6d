"""Worker of the pool: runs one job after another, each in a fresh process group, and restores its state in between."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, Final

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist

from hasten.errors import ConfigError
from hasten.runtime import bootstrap, env
from hasten.runtime.context import ProcessContext
from hasten.runtime.devices import kind_of
from hasten.runtime.mesh import destroy_groups
from hasten.runtime.mesh_plan import MeshSpec
from hasten.runtime.topology import Topology
from hasten.testing.job import STACK_SIGNAL, PoolJob, PoolReport

TEST_SEED: Final = 0
MAX_THREADS: Final = 25
"""Threads after a job with which a worker is reused. Each gloo group has three, of which one polls a hundred times a second;
some libraries never release their groups, and hundreds of them take a processor from the tests that follow."""


class WorkerInterrupted(BaseException):
    """Raised in a rank when another rank failed or the time is up. Not an Exception, so that `except Exception` ignores it."""


def serve_pool(pool: Connection) -> None:
    """Run jobs until the pool closes its pipe."""
    initial_state = _InitialState.remember_state()
    interrupt_handler = _InterruptHandler()
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):
        while True:
            job: PoolJob = pool.recv()
            interrupt_handler.install_handler()
            pool.send(_run_job(job, interrupt_handler))
            pool.recv()  # every rank has reported, so the group is no longer needed
            pool.send(initial_state.restore_state())


class _InterruptHandler:
    """Handler of the pool's SIGINT: raises while a job runs, and does nothing otherwise."""

    def __init__(self) -> None:
        self._running = False

    def install_handler(self) -> None:
        signal.signal(signal.SIGINT, self._handle_signal)

    @contextmanager
    def armed(self) -> Iterator[None]:
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def _handle_signal(self, signal_number: int, frame: FrameType | None) -> None:
        if self._running:
            self._running = False
            raise WorkerInterrupted("stopped by the pool")


def _run_job(job: PoolJob, interrupt_handler: _InterruptHandler) -> PoolReport:
    """Call the function of the job; an exception becomes a report."""
    with _redirect_output(job), warnings.catch_warnings():
        try:
            env.replace_environment(job.env)
            sys.path[:] = job.path
            os.chdir(job.cwd)
            with interrupt_handler.armed():
                fn, args, warning_filters = pickle.loads(job.payload)
                warnings.filters[:] = warning_filters  # type: ignore[index]  # typeshed calls the list a sequence
                returned = fn(_make_context(job), *args)
            return PoolReport(returned=True, value=_pickled_result(returned, fn))
        # the function is arbitrary, and SystemExit must not end the worker
        except BaseException as error:
            return _report_failure(error)


def _report_failure(error: BaseException) -> PoolReport:
    # without the frame of _run
    job_frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(
        traceback.format_exception(
            type(error), error, job_frames or error.__traceback__
        )
    )
    try:
        pickled_error: bytes | None = cloudpickle.dumps(error)
        pickle.loads(pickled_error or b"")
    except Exception:  # an exception that cannot be pickled; its text is sent
        pickled_error = None
    # Detected by name, because pytest need not be installed where workers run.
    skipped = str(error) if type(error).__name__ == "Skipped" else None
    return PoolReport(
        returned=False, value=pickled_error, traceback=text, skipped=skipped
    )


def _pickled_result(returned: object, fn: object) -> bytes:
    try:
        return bytes(cloudpickle.dumps(returned))
    except Exception as error:  # pickling runs the __reduce__ of arbitrary objects
        raise ConfigError(
            f"the result of {fn}, a {type(returned).__name__}, cannot be sent back from the worker ({error}); "
            f"return tensors, numbers and plain containers, or None."
        ) from error


def _make_context(job: PoolJob) -> ProcessContext:
    """Return a fresh context with a fresh group and seeds for this rank. A single rank gets no group, as in a plain script."""
    random.seed(TEST_SEED)
    np.random.seed(TEST_SEED)
    torch.manual_seed(TEST_SEED)
    device = _select_device(job)
    topology = Topology()
    if job.world_size > 1:
        topology = Topology.from_env(job.env)
        dist.init_process_group(
            _select_backend(job),
            store=dist.FileStore(job.store, job.world_size),
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.timeout_s + 30),
        )
    return bootstrap.start(
        topology, device, lambda world_size: MeshSpec.build(world_size, **job.mesh)
    )


def _select_device(job: PoolJob) -> torch.device:
    if job.device == "cpu":
        return torch.device("cpu")
    return torch.device(job.device, job.rank % torch.accelerator.device_count())


def _select_backend(job: PoolJob) -> str:
    """Return gloo, combined with the device's backend if every rank has a separate device."""
    device_backend = None if job.device == "cpu" else kind_of(job.device).backend
    if device_backend and torch.accelerator.device_count() >= job.world_size:
        return f"cpu:gloo,{job.device}:{device_backend}"
    return "gloo"


@contextmanager
def _redirect_output(job: PoolJob) -> Iterator[None]:
    """Context manager that sends all output of this process to the job's output file, and its stacks to the stack file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    output_fd = os.open(job.output, flags, 0o600)
    stack_fd = os.open(job.stack, flags, 0o600)
    for fd in (1, 2):
        os.dup2(output_fd, fd)
    os.close(output_fd)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a TextIOWrapper here
    faulthandler.register(STACK_SIGNAL, file=stack_fd, all_threads=True)
    faulthandler.enable(file=2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        faulthandler.unregister(STACK_SIGNAL)
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)
        os.close(stack_fd)


@dataclass(frozen=True, slots=True)
class _InitialState:
    """State of the worker at its start, restored before every job."""

    env: Mapping[str, str]
    cwd: str
    path: tuple[str, ...]
    # Any: signal.getsignal returns a union that signal.signal does not accept
    signals: Mapping[int, Any]
    handlers: tuple[logging.Handler, ...]
    level: int
    num_modules: list[int]
    """Number of imported modules at the last gc.freeze()."""

    @classmethod
    def remember_state(cls) -> _InitialState:
        signal_numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
        return cls(
            env=env.snapshot(),
            cwd=str(Path.cwd()),
            path=tuple(sys.path),
            signals={
                int(signal_number): handler
                for signal_number in signal_numbers
                if (handler := signal.getsignal(signal_number)) is not None
            },
            handlers=tuple(logging.root.handlers),
            level=logging.root.level,
            num_modules=[0],
        )

    def restore_state(self) -> bool:
        """Undo the job's changes; return False if some remain, so that the worker should be replaced."""
        destroy_groups()
        env.replace_environment(self.env)
        os.chdir(self.cwd)
        sys.path[:] = self.path
        for signal_number, handler in self.signals.items():
            if signal.getsignal(signal_number) is not handler:
                signal.signal(signal_number, handler)
        logging.root.handlers[:] = self.handlers
        logging.root.setLevel(self.level)
        _restore_torch()
        gc.collect()  # objects held by the group
        if len(sys.modules) > self.num_modules[0]:
            self.num_modules[0] = len(sys.modules)
            gc.freeze()  # imported modules stay: later collections can skip them
        return threading.active_count() == 1 and _num_threads() <= MAX_THREADS


def _num_threads() -> int:
    """Return the number of threads of this process, those of native libraries too; 0 where /proc is missing."""
    try:
        return sum(1 for _ in Path("/proc/self/task").iterdir())
    except FileNotFoundError:
        return 0


def _restore_torch() -> None:
    """Restore torch's global settings to those of a fresh process."""
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    torch.backends.cudnn.benchmark = False
    torch.autograd.set_detect_anomaly(False)
    torch._dynamo.reset()
