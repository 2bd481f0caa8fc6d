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
    Status,
    pack,
)
from hasten.testing.processes import Worker, Zygote

R = TypeVar("R")

TIMEOUT_S: Final = 60.0
GRACE_S: Final = 1.5  # after one rank has failed, the others may still finish normally
INTERRUPT_S: Final = 0.5  # an interrupted rank may run its `finally` blocks
STACK_S: Final = 3.0  # dumping stacks takes a moment on a busy machine
CLEAN_S: Final = 10.0
OUTPUT_LIMIT: Final = 20_000
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
class _Call:
    """One function on all its ranks."""

    name: str
    payload: bytes
    num_ranks: int
    timeout_s: float
    mesh: Mapping[str, int]
    device: str
    folder: Path

    def job(self, rank: int, variables: Mapping[str, str]) -> PoolJob:
        place = (
            {"RANK": str(rank), "LOCAL_RANK": str(rank)} if self.num_ranks > 1 else {}
        )
        # an Accelerator created in the call must not use an available accelerator
        if self.device == "cpu":
            place["HASTEN_CPU"] = "1"
        return PoolJob(
            payload=self.payload,
            rank=rank,
            world_size=self.num_ranks,
            folder=str(self.folder),
            timeout_s=self.timeout_s,
            mesh=dict(self.mesh),
            device=self.device,
            env={**variables, **place},
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
            self._idle = [self._zygote.fork() for _ in range(size)]
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
        self._idle, self._cleaning = [], []
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
        loaded = [self._zygote.load(module) for module in modules]
        if any(loaded):
            self._settle()
            self._discard(self._idle)
            self._idle = []

    def run(
        self,
        fn: Callable[..., R],
        num_ranks: int,
        *args: object,
        timeout_s: float = TIMEOUT_S,
        mesh: Mapping[str, int] = _NO_MESH,
        device: str = "cpu",
    ) -> list[R]:
        """Run `fn(ctx, *args)` on `num_ranks` ranks and return its results, in order of rank.

        Raises: RanksFailedError with the traceback or the stacks of every rank, caused by the exception of the rank
        that failed first, if it raised one.
        """
        outcomes = self.outcomes(
            fn, num_ranks, *args, timeout_s=timeout_s, mesh=mesh, device=device
        )
        check(outcomes, _name_of(fn))
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        fn: Callable[..., object],
        num_ranks: int,
        *args: object,
        timeout_s: float = TIMEOUT_S,
        mesh: Mapping[str, int] = _NO_MESH,
        device: str = "cpu",
    ) -> list[RankOutcome]:
        """Return the outcome of `fn(ctx, *args)` on each rank, in order of rank. Does not raise for a rank that failed."""
        payload = pack(fn, args)
        team = self._take(num_ranks)
        folder = self._folder / f"job-{next(self._numbers)}"
        call = _Call(_name_of(fn), payload, num_ranks, timeout_s, mesh, device, folder)
        try:
            folder.mkdir()
            variables = _variables(num_ranks)
            for rank, worker in enumerate(team):
                worker.pipe.send(call.job(rank, variables))
            outcomes = _Watch(team, call, self._zygote).outcomes()
        # Ctrl-C, or the alarm of a test runner: no worker may be left behind
        except BaseException:
            self._discard(team)
            raise
        if all(outcome.status == "returned" for outcome in outcomes):
            for worker in team:
                worker.pipe.send(None)
            self._cleaning += team
        else:
            self._discard(
                [w for w, o in zip(team, outcomes, strict=True) if o.status != "died"]
            )
        return outcomes

    def _take(self, num_ranks: int) -> list[Worker]:
        """Return `num_ranks` clean workers; missing ones are forked."""
        if num_ranks < 1:
            raise ConfigError(
                f"num_ranks={num_ranks} is not a number of processes; it must be at least 1."
            )
        self._settle()
        for job in self._folder.glob("job-*"):
            shutil.rmtree(job, ignore_errors=True)
        # readable only once an idle worker has ended
        gone = [worker for worker in self._idle if worker.pipe.poll()]
        self._discard(gone)
        self._idle = [worker for worker in self._idle if worker not in gone]
        return [self._worker_for(rank) for rank in range(num_ranks)]

    def _settle(self) -> None:
        """Wait for workers that clean up; those that cannot are replaced."""
        for worker in self._cleaning:
            if _is_clean(worker):
                self._idle.append(worker)
            else:
                self._discard([worker])
        self._cleaning = []

    def _worker_for(self, rank: int) -> Worker:
        """Return an idle worker that has only ever had this rank, or a new one.

        DTensor caches the shard of its rank by mesh and shape; in a worker whose rank changed, a cached value of another
        test would select the wrong shard.
        """
        mine = [w for w in self._idle if self._ranks.get(w.pid) == rank] or [
            w for w in self._idle if w.pid not in self._ranks
        ]
        if not mine:
            self._idle.append(self._zygote.fork())
            mine = self._idle[-1:]
        self._idle.remove(mine[0])
        self._ranks[mine[0].pid] = rank
        return mine[0]

    def _discard(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            self._ranks.pop(worker.pid, None)
            worker.kill()
            self._zygote.exit_code(worker)


def _is_clean(worker: Worker) -> bool:
    try:
        return worker.pipe.poll(CLEAN_S) and bool(worker.pipe.recv())
    except (EOFError, ConnectionError):
        return False


def _variables(num_ranks: int) -> dict[str, str]:
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


class _Watch:
    """Collector of the reports of a team, which stops workers that do not report in time."""

    def __init__(self, team: Sequence[Worker], call: _Call, zygote: Zygote) -> None:
        self._call = call
        self._zygote = zygote
        self._pending = dict(enumerate(team))
        self._done: dict[int, RankOutcome] = {}
        """In order of arrival: the first failure is the cause of the others."""

    def outcomes(self) -> list[RankOutcome]:
        self._collect(self._call.timeout_s, patience_s=GRACE_S)
        if self._pending:
            self._stop()
        failed = [o for o in self._done.values() if o.status != "returned"]
        # a rank that died caused the failures of the others, even if they were reported first
        if failed:
            cause = next((o for o in failed if o.status == "died"), failed[0])
            self._done[cause.rank] = replace(cause, first=True)
        return [
            replace(self._done[rank], output=self._read("output", rank))
            for rank in range(self._call.num_ranks)
        ]

    def _collect(self, timeout_s: float, patience_s: float) -> None:
        """Receive reports until all have arrived, the time is up, or `patience_s` after the first failure has passed."""
        deadline = time.monotonic() + timeout_s
        while self._pending and (left_s := deadline - time.monotonic()) > 0:
            ready = wait([worker.pipe for worker in self._pending.values()], left_s)
            for rank, worker in list(self._pending.items()):
                if worker.pipe in ready:
                    del self._pending[rank]
                    self._done[rank] = self._outcome(rank, worker)
                    if self._done[rank].status != "returned":
                        deadline = min(deadline, time.monotonic() + patience_s)

    def _outcome(self, rank: int, worker: Worker) -> RankOutcome:
        try:
            report: PoolReport = worker.pipe.recv()
        except (EOFError, ConnectionError):
            worker.kill()
            return RankOutcome(
                rank, "died", details=_exit_text(self._zygote.exit_code(worker))
            )
        if report.returned:
            return RankOutcome(
                rank, "returned", value=pickle.loads(report.value or b"")
            )
        error = _exception(report.value) if report.value is not None else None
        return RankOutcome(
            rank,
            "raised",
            error=error,
            details=report.traceback,
            skipped=report.skipped,
        )

    def _stop(self) -> None:
        """Record the stacks of the remaining ranks, kill what they have forked, and interrupt them.

        The pool kills those that do not stop.
        """
        status: Status = (
            "interrupted"
            if any(o.status != "returned" for o in self._done.values())
            else "hung"
        )
        stopped = dict(self._pending)
        for worker in stopped.values():
            worker.signal(STACK_SIGNAL)
        deadline = time.monotonic() + STACK_S
        while time.monotonic() < deadline and not all(
            self._read("stack", rank) for rank in stopped
        ):
            time.sleep(0.005)
        stacks = {rank: _own_frames(self._read("stack", rank)) for rank in stopped}
        for worker in stopped.values():
            worker.kill_children()
            worker.signal(signal.SIGINT)
        self._collect(INTERRUPT_S, patience_s=INTERRUPT_S)
        for rank in stopped:
            died = rank in self._done and self._done[rank].status == "died"
            self._done[rank] = RankOutcome(
                rank,
                "died" if died else status,
                details=stacks[rank] or "(no stack: busy in C)",
            )

    def _read(self, what: str, rank: int) -> str:
        path = self._call.folder / f"{what}-{rank}"
        return path.read_text(errors="replace")[-OUTPUT_LIMIT:] if path.exists() else ""


def _exception(pickled: bytes) -> BaseException | None:
    try:
        error = pickle.loads(pickled)
    # a class that only the worker can rebuild; its traceback is available as text
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None


def _own_frames(dump: str) -> str:
    """Return a dump of stacks without the worker's frames below the tested function."""
    return "\n".join(
        line
        for line in dump.splitlines()
        if not any(word in line for word in _WORKER_FRAMES)
    )


def check(outcomes: Sequence[RankOutcome], name: str) -> None:
    """Raise RanksFailedError with all details if any rank failed."""
    __tracebackhide__ = True
    failed = [o for o in outcomes if o.status != "returned"]
    if not failed:
        return
    cause = next(o for o in failed if o.first)
    heads = ", ".join(f"rank {o.rank} {o.status}" for o in outcomes)
    parts = [f"{name} failed on {len(failed)} of {len(outcomes)} ranks: {heads}."]
    for outcome in sorted(outcomes, key=lambda o: (not o.first, o.rank)):
        parts.append(
            f"---- rank {outcome.rank} {outcome.status} ----\n{outcome.details}".rstrip()
        )
        if outcome.output.strip():
            parts.append(
                f"---- output of rank {outcome.rank} ----\n{outcome.output}".rstrip()
            )
    raise RanksFailedError(
        "\n".join(parts), tuple(o.rank for o in failed)
    ) from cause.error


def _exit_text(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"


def _name_of(fn: Callable[..., object]) -> str:
    return str(getattr(fn, "__qualname__", repr(fn)))


def ranks(
    *sizes: int,
    timeout_s: float = TIMEOUT_S,
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

    def decorate(fn: Callable[..., None]) -> Callable[..., None]:
        names = list(inspect.signature(fn).parameters)
        if not names or names[0] == "self" or not sizes:
            raise ConfigError(
                f"@ranks({', '.join(map(str, sizes))}) cannot make a test of {_name_of(fn)}{inspect.signature(fn)}: it needs at least "
                f"one number of ranks, and a plain function whose first argument takes the process context."
            )

        stuck = _BOUND_FIXTURES.intersection(names)
        if stuck:
            raise ConfigError(
                f"{_name_of(fn)} asks for {', '.join(sorted(stuck))}, which works in the pytest process only, while @ranks runs the "
                f"test in workers. Inside the test use pytest.MonkeyPatch.context(), pytest.warns, contextlib.redirect_stdout."
            )

        @functools.wraps(fn)
        def test(**given: Any) -> None:  # Any: fixtures and parameters
            __tracebackhide__ = True
            pool: Pool = given.pop("rank_pool")
            num_ranks: int = given.pop("num_ranks")
            args = [given[name] for name in names[1:]]
            outcomes = pool.outcomes(
                fn, num_ranks, *args, timeout_s=timeout_s, mesh=mesh, device=device
            )
            for outcome in outcomes:
                if outcome.first and outcome.skipped is not None:
                    pytest.skip(outcome.skipped)
            check(outcomes, f"{fn.__name__}[{num_ranks} ranks]")
            for outcome in outcomes:
                if outcome.output:
                    sys.stdout.write(f"[rank {outcome.rank}] {outcome.output}")

        kind = inspect.Parameter.KEYWORD_ONLY
        wanted = ["rank_pool", "num_ranks", *names[1:]]
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, kind) for name in wanted]
        )
        worlds = [pytest.param(size, id=f"{size}-ranks") for size in sizes]
        worlds += [
            pytest.param(size, id=f"{size}-ranks", marks=pytest.mark.exhaustive)
            for size in exhaustive
        ]
        parametrize = pytest.mark.parametrize("num_ranks", worlds)
        marked: Callable[..., None] = parametrize(test)
        return marked

    return decorate
