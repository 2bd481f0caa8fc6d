"""The pool when tests go wrong: what is reported, that nothing hangs, and that the next test runs."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from hasten.errors import ConfigError, RanksFailedError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool, ranks

pytestmark = pytest.mark.timed


def meet(ctx: ProcessContext) -> float:
    """Needs every rank."""
    return ctx.world.all_reduce(torch.ones(1)).item()


def raise_on_one(ctx: ProcessContext) -> None:
    print(f"hello from {ctx.rank}")  # noqa: T201 - printing is what is tested
    if ctx.rank == 1:
        raise ValueError("the reason")
    meet(ctx)


def raise_on_all(ctx: ProcessContext) -> None:
    raise KeyError(f"key {ctx.rank}")


def sleep_on_one(ctx: ProcessContext) -> None:
    if ctx.rank == 1:
        time.sleep(3600)
    meet(ctx)


def wait_in_a_fork() -> None:
    time.sleep(3600)


def fork_and_wait(ctx: ProcessContext, folder: Path) -> None:
    child = multiprocessing.get_context("fork").Process(
        target=wait_in_a_fork, daemon=True
    )
    child.start()
    # has no handler for the signal, which is not sent to it
    asleep = subprocess.Popen(["sleep", "3600"])
    (folder / str(ctx.rank)).write_text(f"{child.pid} {asleep.pid}")
    child.join()


def spin_on_one(ctx: ProcessContext) -> None:
    """Ignores interrupts too: only killing helps."""
    while ctx.rank == 1:
        with contextlib.suppress(BaseException):
            time.sleep(3600)
    meet(ctx)


def leave_hard(ctx: ProcessContext) -> None:
    if ctx.rank == 1:
        os._exit(7)
    meet(ctx)


def be_killed(ctx: ProcessContext) -> None:
    if ctx.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    meet(ctx)


def segfault(ctx: ProcessContext) -> None:
    if ctx.rank == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    meet(ctx)


def leave_softly(ctx: ProcessContext) -> None:
    if ctx.rank == 0:
        sys.exit("enough")


def return_a_lambda_holder(ctx: ProcessContext) -> object:
    return (number for number in range(3))


@pytest.fixture(autouse=True)
def still_works(rank_pool: Pool) -> Iterator[None]:
    """After every failure, all ranks meet again."""
    yield
    assert rank_pool.run(meet, 2) == [2.0, 2.0]
    assert rank_pool.run(meet, 3) == [3.0, 3.0, 3.0]


def failure(
    pool: Pool,
    fn: Callable[[ProcessContext], object],
    timeout_s: float = 60.0,
    num_ranks: int = 2,
) -> RanksFailedError:
    with pytest.raises(RanksFailedError) as caught:
        pool.run(fn, num_ranks, timeout_s=timeout_s)
    return caught.value


def test_exception_on_one_rank_shows_its_traceback_and_the_others_stacks(
    rank_pool: Pool,
) -> None:
    start = time.monotonic()
    error = failure(rank_pool, raise_on_one, num_ranks=3)
    assert time.monotonic() - start < 10
    text = str(error)
    assert "rank 0 interrupted, rank 1 raised, rank 2 interrupted" in text
    assert 'raise ValueError("the reason")' in text
    assert (
        text.index("rank 1 raised ----")
        < text.index("rank 0 interrupted ----")
        < text.index("rank 2 interrupted -")
    )
    assert text.count("in meet") == 2
    assert "testing/worker.py" not in text
    assert "hello from 0" in text
    assert "hello from 1" in text
    assert isinstance(error.__cause__, ValueError)
    assert error.ranks == (0, 1, 2)


def test_exception_on_every_rank_is_reported_for_each(rank_pool: Pool) -> None:
    error = failure(rank_pool, raise_on_all)
    assert "key 0" in str(error)
    assert "key 1" in str(error)
    assert isinstance(error.__cause__, KeyError)


@pytest.mark.parametrize("fn", [sleep_on_one, spin_on_one])
def test_hang_is_stopped_after_the_timeout_with_all_stacks(
    rank_pool: Pool, fn: Callable[[ProcessContext], None]
) -> None:
    start = time.monotonic()
    text = str(failure(rank_pool, fn, timeout_s=1.0))
    assert 1.0 < time.monotonic() - start < 10
    assert "rank 0 hung, rank 1 hung" in text
    assert f"in {fn.__name__}" in text
    assert "in meet" in text


def test_forked_processes_of_stopped_ranks_end(rank_pool: Pool, tmp_path: Path) -> None:
    text = str(
        failure(rank_pool, partial(fork_and_wait, folder=tmp_path), timeout_s=1.0)
    )
    assert "rank 0 hung, rank 1 hung" in text
    pids = [pid for rank in "01" for pid in (tmp_path / rank).read_text().split()]
    deadline = time.monotonic() + 10
    while (
        alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    ) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(pids) == 4
    assert not alive


@pytest.mark.parametrize(
    ("fn", "rank", "death"),
    [
        (leave_hard, 1, "exit code 7"),
        (be_killed, 0, "SIGKILL"),
        (segfault, 0, "SIGSEGV"),
    ],
)
def test_death_of_a_process_is_told_first(
    rank_pool: Pool, fn: Callable[[ProcessContext], None], rank: int, death: str
) -> None:
    text = str(failure(rank_pool, fn))
    assert f"---- rank {rank} died ----" in text
    assert death in text
    assert text.index(f"---- rank {rank} died") < text.index(
        f"---- rank {1 - rank} raised"
    )


def test_sys_exit_is_a_failure(rank_pool: Pool) -> None:
    error = failure(rank_pool, leave_softly)
    assert "SystemExit: enough" in str(error)
    assert "rank 1 returned" in str(error)
    assert isinstance(error.__cause__, SystemExit)


def test_result_that_cannot_travel_is_refused(rank_pool: Pool) -> None:
    error = failure(rank_pool, return_a_lambda_holder)
    assert isinstance(error.__cause__, ConfigError)
    assert "a generator, cannot be sent back" in str(error)


def test_argument_that_cannot_travel_is_refused(rank_pool: Pool) -> None:
    with pytest.raises(
        ConfigError,
        match="argument 1 after the context, a generator, cannot be pickled",
    ):
        rank_pool.run(meet, 2, 1, (number for number in range(3)))
    with pytest.raises(ConfigError, match="num_ranks=0"):
        rank_pool.run(meet, 0)


def test_worker_killed_while_idle_is_replaced(rank_pool: Pool) -> None:
    pids = rank_pool.run(lambda ctx: os.getpid(), 2)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    fresh = rank_pool.run(lambda ctx: os.getpid(), 2)
    assert not set(pids) & set(fresh)


def test_workers_are_reused_when_nothing_went_wrong(rank_pool: Pool) -> None:
    pids = set(rank_pool.run(lambda ctx: os.getpid(), 2))
    assert any(set(rank_pool.run(lambda ctx: os.getpid(), 2)) & pids for _ in range(2))


def test_failing_test_replaces_its_workers(rank_pool: Pool) -> None:
    pids = rank_pool.run(lambda ctx: os.getpid(), 3)
    failure(rank_pool, raise_on_all, num_ranks=3)
    assert not set(pids) & set(rank_pool.run(lambda ctx: os.getpid(), 3))


def test_interrupting_the_caller_ends_the_call(rank_pool: Pool) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGUSR1, interrupt)
    timer = subprocess.Popen(["sh", "-c", f"sleep 1; kill -USR1 {os.getpid()}"])
    try:
        with pytest.raises(KeyboardInterrupt):
            rank_pool.run(sleep_on_one, 2)
    finally:
        timer.wait()
        signal.signal(signal.SIGUSR1, previous)


def test_close_leaves_nothing_behind() -> None:
    """The conftest looks for descriptors, threads and children; this one looks for orphans and files."""
    with Pool(2) as pool:
        pids = pool.run(lambda ctx: os.getpid(), 3)
        folder = pool.run(lambda ctx: Path("/proc/self/fd/1").readlink(), 1)[
            0
        ].parent.parent
        with pytest.raises(RanksFailedError):
            pool.run(raise_on_one, 2)
        assert folder.name.startswith("hasten-pool-")
    deadline = time.monotonic() + 5
    while (
        any(Path(f"/proc/{pid}").exists() for pid in pids)
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not folder.exists()


def test_workers_end_when_the_caller_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    script.write_text(
        "import os, signal, sys\n"
        "from hasten.testing.pool import Pool\n"
        "pool = Pool(2)\n"
        "pids = pool.run(lambda ctx: (os.getpid(), os.getppid()), 2)\n"
        "print(*{pid for pair in pids for pid in pair}, pool._folder, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    *pids, folder = done.stdout.split()
    assert len(pids) == 3
    deadline = time.monotonic() + 10
    while (
        any(Path(f"/proc/{pid}").exists() for pid in pids)
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not Path(folder).exists()


def test_decorator_refuses_what_cannot_work() -> None:
    def patches(ctx: ProcessContext, monkeypatch: pytest.MonkeyPatch) -> None: ...
    def method(self: object, ctx: ProcessContext) -> None: ...

    with pytest.raises(ConfigError, match=r"asks for monkeypatch.*MonkeyPatch.context"):
        ranks(2)(patches)
    with pytest.raises(ConfigError, match="plain function"):
        ranks(2)(method)
    with pytest.raises(ConfigError, match="at least one number of ranks"):
        ranks()(leave_softly)


def test_decorator_reports_as_pytest_does(tmp_path: Path) -> None:
    """A run of its own: its failures and skips are what is tested."""
    (tmp_path / "test_mine.py").write_text(
        "import os, pytest\n"
        "from hasten.testing.pool import ranks\n"
        "@ranks(2)\n"
        "def test_skips(ctx):\n"
        "    pytest.skip('not today')\n"
        "@ranks(1, 2)\n"
        "def test_fails(ctx):\n"
        "    print('said by', ctx.rank)\n"
        "    seen = [ctx.rank]\n"
        "    assert seen == [7]\n"
        "@ranks(2)\n"
        "@pytest.mark.xfail(reason='known', raises=Exception)\n"
        "def test_expected(ctx):\n"
        "    raise ValueError\n"
        "@ranks(2)\n"
        "def test_passes(ctx, tmp_path):\n"
        "    assert os.path.isdir(tmp_path)\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-ra",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert "2 failed, 1 passed, 1 skipped, 1 xfailed" in done.stdout, (
        done.stdout + done.stderr
    )
    for words in ("not today", "assert [1] == [7]", "said by 1"):
        assert words in done.stdout
