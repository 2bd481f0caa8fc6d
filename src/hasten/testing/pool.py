"""Warm workers for testing distributed code: `@ranks(2, 4)` for pytest, `Pool` for everything else.

    @ranks(1, 2, 4)
    def test_mean(ctx: ProcessContext) -> None:
        x = torch.full((3,), float(ctx.rank))
        assert ctx.world.all_reduce(x, "mean")[0] == (ctx.world.size - 1) / 2

The processes are started once and run one test after another, each in a fresh gloo group. A test that raises on one
rank, hangs or kills its process does not affect other tests: its workers are replaced.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self, TypeVar

from hasten.errors import ConfigError, RanksFailedError
from hasten.optional import need
from hasten.runtime import env
from hasten.testing.job import (
    STACK_SIGNAL,
    PoolJob,
    PoolReport,
    RankOutcome,
    RankStatus,
    pack_call,
)
from hasten.testing.processes import Worker, Zygote

Result = TypeVar("Result")

RANKS_TIMEOUT_S: Final = 60.0
FAILURE_GRACE_S: Final = (
    1.5  # after one rank has failed, the others may still finish normally
)
INTERRUPT_TIMEOUT_S: Final = 0.5  # an interrupted rank may run its `finally` blocks
STACK_TIMEOUT_S: Final = 3.0  # dumping stacks takes a moment on a busy machine
CLEANUP_TIMEOUT_S: Final = 10.0
MAX_OUTPUT_CHARS: Final = 20_000
_WORKER_FRAMES: Final = (
    "hasten/testing/worker.py",
    "hasten/testing/zygote.py",
    "<frozen runpy>",
)
_BOUND_FIXTURES: Final = frozenset(
    {
        "monkeypatch",
        "capsys",
        "capfd",
        "capsysbinary",
        "caplog",
        "recwarn",
        "request",
        "pytester",
    }
)
_NO_MESH: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _PoolCall:
    """One function on all its ranks."""

    name: str
    payload: bytes
    num_ranks: int
    timeout_s: float
    mesh: Mapping[str, int]
    device: str
    folder: Path

    def make_job(self, rank: int, variables: Mapping[str, str]) -> PoolJob:
        if self.num_ranks > 1:
            rank_variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        else:
            rank_variables = {}
        # an Accelerator created in the call must not use an available accelerator
        if self.device == "cpu":
            rank_variables["HASTEN_CPU"] = "1"
        return PoolJob(
            payload=self.payload,
            rank=rank,
            world_size=self.num_ranks,
            folder=str(self.folder),
            timeout_s=self.timeout_s,
            mesh=dict(self.mesh),
            device=self.device,
            env={**variables, **rank_variables},
            path=tuple(sys.path),
            cwd=str(Path.cwd()),
        )


class Pool:
    """Worker processes that run functions `fn(ctx, *args)` on any number of ranks.

    `size` workers are started in advance; more are started when a call needs them. Not for use from several threads.
    """

    def __init__(self, size: int = 0) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hasten-pool-"))
        self._idle: list[Worker] = []
        self._cleaning: list[Worker] = []
        self._numbers = count()
        self._ranks: dict[int, int] = {}
        self._zygote = Zygote(self._folder, env.snapshot())
        try:
            self._idle = [self._zygote.fork() for worker_number in range(size)]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process and remove every file of the pool."""
        for worker in (*self._idle, *self._cleaning):
            worker.pipe.close()
        self._idle = []
        self._cleaning = []
        self._zygote.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def descriptors(self) -> frozenset[int]:
        """File descriptors of the pool, to be ignored by leak checks."""
        return frozenset(
            worker.pipe.fileno() for worker in (*self._idle, *self._cleaning)
        )

    def preload(self, *modules: str) -> None:
        """Import modules once for all workers, instead of once in each; modules that are not installed are ignored.

        Workers are forked from the process that imports them, so that existing workers are replaced.
        """
        loaded = list(map(self._zygote.load, modules))
        if any(loaded):
            self._await_cleanup()
            self._discard_workers(self._idle)
            self._idle = []

    def run(
        self,
        fn: Callable[..., Result],
        num_ranks: int,
        *args: object,
        timeout_s: float = RANKS_TIMEOUT_S,
        mesh: Mapping[str, int] = _NO_MESH,
        device: str = "cpu",
    ) -> list[Result]:
        """Run `fn(ctx, *args)` on `num_ranks` ranks and return its results, in order of rank.

        Raises: RanksFailedError with the traceback or the stacks of every rank, caused by the exception of the rank
        that failed first, if it raised one.
        """
        outcomes = self.outcomes(
            fn, num_ranks, *args, timeout_s=timeout_s, mesh=mesh, device=device
        )
        check_outcomes(outcomes, _name_of(fn))
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        fn: Callable[..., object],
        num_ranks: int,
        *args: object,
        timeout_s: float = RANKS_TIMEOUT_S,
        mesh: Mapping[str, int] = _NO_MESH,
        device: str = "cpu",
    ) -> list[RankOutcome]:
        """Return the outcome of `fn(ctx, *args)` on each rank, in order of rank. Does not raise for a rank that failed."""
        payload = pack_call(fn, args)
        workers = self._take_workers(num_ranks)
        folder = self._folder / f"job-{next(self._numbers)}"
        pool_call = _PoolCall(
            _name_of(fn), payload, num_ranks, timeout_s, mesh, device, folder
        )
        try:
            folder.mkdir()
            variables = _worker_variables(num_ranks)
            for rank, worker in enumerate(workers):
                worker.pipe.send(pool_call.make_job(rank, variables))
            outcomes = _TeamWatch(workers, pool_call, self._zygote).outcomes()
        # Ctrl-C, or the alarm of a test runner: no worker may be left behind
        except BaseException:
            self._discard_workers(workers)
            raise
        if all(outcome.status == "returned" for outcome in outcomes):
            for worker in workers:
                worker.pipe.send(None)
            self._cleaning += workers
        else:
            live_workers = []
            for worker, outcome in zip(workers, outcomes, strict=True):
                if outcome.status != "died":
                    live_workers.append(worker)
            self._discard_workers(live_workers)
        return outcomes

    def _take_workers(self, num_ranks: int) -> list[Worker]:
        """Return `num_ranks` clean workers; missing ones are forked."""
        if num_ranks < 1:
            raise ConfigError(
                f"num_ranks={num_ranks} is not a number of processes; it must be at least 1."
            )
        self._await_cleanup()
        for job_folder in self._folder.glob("job-*"):
            shutil.rmtree(job_folder, ignore_errors=True)
        # readable only once an idle worker has ended
        dead_workers = [worker for worker in self._idle if worker.pipe.poll()]
        self._discard_workers(dead_workers)
        self._idle = [worker for worker in self._idle if worker not in dead_workers]
        return list(map(self._worker_for, range(num_ranks)))

    def _await_cleanup(self) -> None:
        """Wait for workers that clean up; those that cannot are replaced."""
        for worker in self._cleaning:
            if _is_clean(worker):
                self._idle.append(worker)
            else:
                self._discard_workers([worker])
        self._cleaning = []

    def _worker_for(self, rank: int) -> Worker:
        """Return an idle worker that has only ever had this rank, or a new one.

        DTensor caches the shard of its rank by mesh and shape; in a worker whose rank changed, a cached value of another
        test would select the wrong shard.
        """
        usable_workers = [
            worker for worker in self._idle if self._ranks.get(worker.pid) == rank
        ] or [worker for worker in self._idle if worker.pid not in self._ranks]
        if not usable_workers:
            self._idle.append(self._zygote.fork())
            usable_workers = self._idle[-1:]
        self._idle.remove(usable_workers[0])
        self._ranks[usable_workers[0].pid] = rank
        return usable_workers[0]

    def _discard_workers(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            self._ranks.pop(worker.pid, None)
            worker.kill()
            self._zygote.exit_code(worker)


def _is_clean(worker: Worker) -> bool:
    try:
        return worker.pipe.poll(CLEANUP_TIMEOUT_S) and bool(worker.pipe.recv())
    except (EOFError, ConnectionError):
        return False


def _worker_variables(num_ranks: int) -> dict[str, str]:
    """Return the caller's environment with the workers' rendezvous on this machine, whatever its name resolves to."""
    variables = {
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        **env.snapshot(),
    }
    if num_ranks == 1:
        return variables
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        **variables,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }


class _TeamWatch:
    """Collector of the reports of a team, which stops workers that do not report in time."""

    def __init__(
        self, workers: Sequence[Worker], pool_call: _PoolCall, zygote: Zygote
    ) -> None:
        self._call = pool_call
        self._zygote = zygote
        self._pending = dict(enumerate(workers))
        self._done: dict[int, RankOutcome] = {}
        """In order of arrival: the first failure is the cause of the others."""

    def outcomes(self) -> list[RankOutcome]:
        self._collect_reports(self._call.timeout_s, patience_s=FAILURE_GRACE_S)
        if self._pending:
            self._stop_ranks()
        failed_outcomes = [
            outcome for outcome in self._done.values() if outcome.status != "returned"
        ]
        # a rank that died caused the failures of the others, even if they were reported first
        if failed_outcomes:
            first_failure = min(
                failed_outcomes, key=lambda outcome: outcome.status != "died"
            )
            self._done[first_failure.rank] = replace(first_failure, first=True)
        outcomes = []
        for rank in range(self._call.num_ranks):
            outcomes.append(
                replace(self._done[rank], output=self._read_file("output", rank))
            )
        return outcomes

    def _collect_reports(self, timeout_s: float, patience_s: float) -> None:
        """Receive reports until all have arrived, the time is up, or `patience_s` after the first failure has passed."""
        deadline = time.monotonic() + timeout_s
        while self._pending and (left_s := deadline - time.monotonic()) > 0:
            ready_pipes = wait(
                [worker.pipe for worker in self._pending.values()], left_s
            )
            for rank, worker in list(self._pending.items()):
                if worker.pipe in ready_pipes:
                    del self._pending[rank]
                    self._done[rank] = self._receive_outcome(rank, worker)
                    if self._done[rank].status != "returned":
                        deadline = min(deadline, time.monotonic() + patience_s)

    def _receive_outcome(self, rank: int, worker: Worker) -> RankOutcome:
        try:
            report: PoolReport = worker.pipe.recv()
        except (EOFError, ConnectionError):
            worker.kill()
            return RankOutcome(
                rank, "died", details=_describe_exit(self._zygote.exit_code(worker))
            )
        if report.returned:
            return RankOutcome(
                rank, "returned", value=pickle.loads(report.value or b"")
            )
        error = _unpickle_exception(report.value) if report.value is not None else None
        return RankOutcome(
            rank,
            "raised",
            error=error,
            details=report.traceback,
            skipped=report.skipped,
        )

    def _stop_ranks(self) -> None:
        """Record the stacks of the remaining ranks, kill what they have forked, and interrupt them.

        The pool kills those that do not stop.
        """
        if any(outcome.status != "returned" for outcome in self._done.values()):
            stop_status: RankStatus = "interrupted"
        else:
            stop_status = "hung"
        stopped_workers = dict(self._pending)
        for worker in stopped_workers.values():
            worker.signal(STACK_SIGNAL)
        deadline = time.monotonic() + STACK_TIMEOUT_S
        while time.monotonic() < deadline and not all(
            self._read_file("stack", rank) for rank in stopped_workers
        ):
            time.sleep(0.005)
        rank_stacks = {}
        for rank in stopped_workers:
            rank_stacks[rank] = _without_worker_frames(self._read_file("stack", rank))
        for worker in stopped_workers.values():
            worker.kill_children()
            worker.signal(signal.SIGINT)
        self._collect_reports(INTERRUPT_TIMEOUT_S, patience_s=INTERRUPT_TIMEOUT_S)
        for rank in stopped_workers:
            has_died = rank in self._done and self._done[rank].status == "died"
            self._done[rank] = RankOutcome(
                rank,
                "died" if has_died else stop_status,
                details=rank_stacks[rank] or "(no stack: busy in C)",
            )

    def _read_file(self, file_prefix: str, rank: int) -> str:
        path = self._call.folder / f"{file_prefix}-{rank}"
        if path.exists():
            return path.read_text(errors="replace")[-MAX_OUTPUT_CHARS:]
        return ""


def _unpickle_exception(pickled: bytes) -> BaseException | None:
    try:
        error = pickle.loads(pickled)
    # a class that only the worker can rebuild; its traceback is available as text
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None


def _without_worker_frames(stack_dump: str) -> str:
    """Return a dump of stacks without the worker's frames below the tested function."""
    return "\n".join(
        line
        for line in stack_dump.splitlines()
        if not any(frame_marker in line for frame_marker in _WORKER_FRAMES)
    )


def check_outcomes(outcomes: Sequence[RankOutcome], name: str) -> None:
    """Raise RanksFailedError with all details if any rank failed."""
    __tracebackhide__ = True
    failed_outcomes = [o for o in outcomes if o.status != "returned"]
    if not failed_outcomes:
        return
    first_failure = next(o for o in failed_outcomes if o.first)
    rank_statuses = ", ".join(f"rank {o.rank} {o.status}" for o in outcomes)
    report_parts = [
        f"{name} failed on {len(failed_outcomes)} of {len(outcomes)} ranks: {rank_statuses}."
    ]
    for outcome in sorted(outcomes, key=lambda o: (not o.first, o.rank)):
        report_parts.append(
            f"---- rank {outcome.rank} {outcome.status} ----\n{outcome.details}".rstrip()
        )
        if outcome.output.strip():
            report_parts.append(
                f"---- output of rank {outcome.rank} ----\n{outcome.output}".rstrip()
            )
    raise RanksFailedError(
        "\n".join(report_parts), tuple(o.rank for o in failed_outcomes)
    ) from first_failure.error


def _describe_exit(exit_code: int) -> str:
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"the process ended with exit code {exit_code}"


def _name_of(fn: Callable[..., object]) -> str:
    return str(getattr(fn, "__qualname__", repr(fn)))


def ranks(
    *sizes: int,
    timeout_s: float = RANKS_TIMEOUT_S,
    mesh: Mapping[str, int] = _NO_MESH,
    device: str = "cpu",
    exhaustive: Sequence[int] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function `(ctx, ...)` into a pytest test that runs on every rank, once for each number of ranks in `sizes`.

    Further arguments are fixtures or parameters as for any test; their values are sent to the workers, which are other
    processes: `tmp_path` works (one folder for all ranks), `monkeypatch` or `capsys` do not. `mesh` has the sizes of axes
    as for MeshSpec.build; `device` is a device type, whose devices the ranks share if there are too few. Numbers
    of ranks in `exhaustive` are run too, with the mark of that name, so that `-m 'not exhaustive'` skips them.
    """
    pytest = need("pytest", why="the ranks decorator")

    def make_test(fn: Callable[..., None]) -> Callable[..., None]:
        argument_names = list(inspect.signature(fn).parameters)
        if not argument_names or argument_names[0] == "self" or not sizes:
            raise ConfigError(
                f"@ranks({', '.join(map(str, sizes))}) cannot make a test of {_name_of(fn)}{inspect.signature(fn)}: it needs at least "
                f"one number of ranks, and a plain function whose first argument takes the process context."
            )

        bound_fixtures = _BOUND_FIXTURES.intersection(argument_names)
        if bound_fixtures:
            raise ConfigError(
                f"{_name_of(fn)} asks for {', '.join(sorted(bound_fixtures))}, which works in the pytest process only, while @ranks runs the "
                f"test in workers. Inside the test use pytest.MonkeyPatch.context(), pytest.warns, contextlib.redirect_stdout."
            )

        @functools.wraps(fn)
        def run_test(**fixture_values: Any) -> None:  # Any: fixtures and parameters
            __tracebackhide__ = True
            pool: Pool = fixture_values.pop("rank_pool")
            num_ranks: int = fixture_values.pop("num_ranks")
            fixture_arguments = []
            for argument_name in argument_names[1:]:
                fixture_arguments.append(fixture_values[argument_name])
            outcomes = pool.outcomes(
                fn,
                num_ranks,
                *fixture_arguments,
                timeout_s=timeout_s,
                mesh=mesh,
                device=device,
            )
            for outcome in outcomes:
                if outcome.first and outcome.skipped is not None:
                    pytest.skip(outcome.skipped)
            check_outcomes(outcomes, f"{fn.__name__}[{num_ranks} ranks]")
            for outcome in outcomes:
                if outcome.output:
                    sys.stdout.write(f"[rank {outcome.rank}] {outcome.output}")

        keyword_only = inspect.Parameter.KEYWORD_ONLY
        test_arguments = ["rank_pool", "num_ranks", *argument_names[1:]]
        run_test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, keyword_only) for name in test_arguments]
        )
        rank_parameters = [pytest.param(size, id=f"{size}-ranks") for size in sizes]
        for size in exhaustive:
            rank_parameters.append(
                pytest.param(size, id=f"{size}-ranks", marks=pytest.mark.exhaustive)
            )
        parametrize = pytest.mark.parametrize("num_ranks", rank_parameters)
        parametrized_test: Callable[..., None] = parametrize(run_test)
        return parametrized_test

    return make_test
