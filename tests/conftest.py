"""Run every test in order, against the clock, and leave the process as it was found."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest

# pytest has no public way to run a test once more
from _pytest.runner import runtestprotocol

from hasten.testing.plugin import POOL
from tests.support.processors import Limit, processor_time, stolen_since

# Two threads per process on two cores make distributed tests three times slower; torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT: Final = Path(__file__).parent
TIERS: Final = ("arch", "unit", "dist", "laws", "examples", "golden", "device", "xla")
TIMEOUT_S: Final = 120.0
# threads and children that were told to stop may need a moment, more of it on a busy machine
GRACE_S: Final = 8.0
# torch sets the last two for good when its compiler is first imported, which the first optimizer does
IGNORED_VARIABLES: Final = frozenset(
    {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
)
IGNORED_FILES: Final = (
    *("/dev/null", "/dev/urandom", "/dev/random", "/proc/", "/sys/", "/dev/nvidia"),
    # torch's matrix library keeps a map of the code it generates, open forever (Arm processors)
    "/tmp/perf-",
)
IGNORED_CHILDREN: Final = ("resource_tracker", "forkserver", "semaphore_tracker")
MOST_S: Final = 400.0  # pytest's faulthandler_timeout comes after it
# tests in a whole run that are run again; more failures than that are no accident
MOST_RERUNS: Final = 4
STARVED: Final = 0.1
HALF: Final = 0.5
PROCESSORS_SECTION: Final = "processors"
CALM_S: Final = 60.0
PROCESSORS: Final = pytest.StashKey[tuple[int, int]]()
RERUNS: Final = pytest.StashKey[int]()
NUM_MODULES: Final = pytest.StashKey[int]()
WATCHED_SIGNALS: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
)


# ---------------------------------------------------------------------------------------------------------------
# Leak police: a picture before and after each test; what is new and stays is a failure that names it.
# ---------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Picture:
    """What one process holds at one moment."""

    variables: dict[str, str]
    threads: frozenset[threading.Thread]
    files: dict[int, str]
    children: dict[int, str]
    groups: bool
    folder: str
    signals: tuple[object, ...]


def take_picture() -> Picture:
    """Return what this process holds now."""
    distributed = sys.modules.get("torch.distributed")
    return Picture(
        variables={k: v for k, v in os.environ.items() if k not in IGNORED_VARIABLES},
        threads=frozenset(threading.enumerate()),
        files=open_files(),
        children=child_processes(),
        groups=bool(
            distributed and distributed.is_available() and distributed.is_initialized()
        ),
        folder=str(Path.cwd()),
        signals=tuple(signal.getsignal(s) for s in WATCHED_SIGNALS),
    )


def open_files() -> dict[int, str]:
    """Return descriptor -> target for the files, pipes and sockets this process holds; empty where /proc is missing."""
    targets: dict[int, str] = {}
    try:
        links = list(Path("/proc/self/fd").iterdir())
    except FileNotFoundError:
        return targets
    for link in links:
        try:
            target = str(link.readlink())
        # closed since it was listed, such as the listing's own descriptor
        except OSError:
            continue
        if not target.startswith(IGNORED_FILES):
            targets[int(link.name)] = target
    return targets


def child_processes() -> dict[int, str]:
    """Return pid -> command line of the children of this process, whichever thread started them."""
    commands: dict[int, str] = {}
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            pids = task.read_text().split()
        except OSError:  # the thread ended in the meantime
            continue
        for pid in pids:
            try:
                command = (
                    Path(f"/proc/{pid}/cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                    .strip()
                )
            except OSError:  # reaped in the meantime
                continue
            if not any(word in command for word in IGNORED_CHILDREN):
                commands[int(pid)] = command or "(ended, never waited for)"
    return commands


def leaks(earlier: Picture, later: Picture) -> list[str]:
    """Return one line for each thing that `later` holds and `earlier` did not."""
    lines = []
    for name in sorted(earlier.variables.keys() | later.variables.keys()):
        old, new = earlier.variables.get(name), later.variables.get(name)
        if old != new:
            lines.append(f"environment variable {name}: {old!r} became {new!r}")
    lines += sorted(
        f"thread {thread.name!r} still runs"
        for thread in later.threads - earlier.threads
    )
    lines += [
        f"file descriptor {fd} is open: {description}"
        for fd, description in later.files.items()
        if earlier.files.get(fd) != description
    ]
    lines += [
        f"child process {pid} is alive: {description}"
        for pid, description in later.children.items()
        if pid not in earlier.children
    ]
    if later.groups and not earlier.groups:
        lines.append("the default process group is still initialised")
    if later.folder != earlier.folder:
        lines.append(
            f"the working folder moved from {earlier.folder} to {later.folder}"
        )
    for sig, old_handler, new_handler in zip(
        WATCHED_SIGNALS, earlier.signals, later.signals, strict=True
    ):
        if old_handler != new_handler:
            lines.append(
                f"the handler of {sig.name} changed from {old_handler!r} to {new_handler!r}"
            )
    return lines


def without_pool(picture: Picture, config: pytest.Config) -> Picture:
    """Return the picture without the pipes to the run's pool of workers, which come and go with the workers."""
    pool = config.stash.get(POOL, None)
    pool_descriptors = pool.descriptors if pool else frozenset()
    return replace(
        picture,
        files={
            fd: target
            for fd, target in picture.files.items()
            if fd not in pool_descriptors
        },
    )


@pytest.fixture(autouse=True)
def leak_police(request: pytest.FixtureRequest) -> Generator[None]:
    """Fail the test that leaves something behind.

    Being function-scoped and automatic, it starts after wider fixtures (a session's worker pool is no leak) and ends
    after the test's own fixtures are undone.
    """
    initial_picture = take_picture()
    yield
    deadline = time.monotonic() + GRACE_S
    while leak_lines := leaks(
        initial_picture, without_pool(take_picture(), request.config)
    ):
        if time.monotonic() > deadline:
            break
        gc.collect()
        time.sleep(0.02)
    if leak_lines:
        pytest.fail(
            f"{request.node.nodeid} left behind:\n  " + "\n  ".join(leak_lines),
            pytrace=False,
        )


# ---------------------------------------------------------------------------------------------------------------
# Clock: an alarm in the test first; pytest's faulthandler_timeout ends the run if the alarm cannot be served.
# ---------------------------------------------------------------------------------------------------------------
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test against the clock, and once more if it failed while the host took the processors away.

    A `timed` test is run again where the host took a tenth of their time, any other test where it took half, since limits
    of subprocesses and of waiting ranks are then unreliable. A test is run again once at most, and `MOST_RERUNS` tests in a
    whole run. The summary lists every one of them with its first failure; a test that fails twice has failed.
    """
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    initial_times = processor_time()
    with alarm(item):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if note := reason_to_run_again(item, reports, stolen_since(initial_times)):
        item.config.stash[RERUNS] = item.config.stash.get(RERUNS, 0) + 1
        wait_for_processors()
        with alarm(item):
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
        reports[-1].sections.append((PROCESSORS_SECTION, note))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def reason_to_run_again(
    item: pytest.Item, reports: list[pytest.TestReport], share: float
) -> str:
    """Return the first line of a failure that a starved host may have caused, with the stolen share; "" if none may."""
    timed = item.get_closest_marker("timed") is not None
    failed = [report for report in reports if report.failed]
    if (
        not failed
        or share < (STARVED if timed else HALF)
        or item.config.stash.get(RERUNS, 0) >= rerun_budget(item.config)
    ):
        return ""
    crash = getattr(failed[0].longrepr, "reprcrash", None)
    first = (
        str(crash.message if crash else failed[0].longreprtext)
        .strip()
        .partition("\n")[0]
    )
    return f"failed while the host of this machine gave {share:.0%} of the processors' time to others: {first}"


def rerun_budget(config: pytest.Config) -> int:
    """Return the number of tests that this process may run again: its part of those of the whole run."""
    return MOST_RERUNS // int(getattr(config, "workerinput", {}).get("workercount", 1))


@contextmanager
def alarm(item: pytest.Item) -> Generator[None]:
    """Stop a test that takes longer than its `timeout` mark, or two minutes, with the stacks of all threads."""
    mark = item.get_closest_marker("timeout")
    seconds = float(mark.args[0]) if mark else TIMEOUT_S

    limit = Limit(seconds, MOST_S)

    def stop(signum: int, frame: object) -> None:
        if (left := limit.left()) > 0.01:
            signal.setitimer(signal.ITIMER_REAL, left)
            return
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        pytest.fail(
            f"took longer than {seconds:g} s; the stacks of all threads are in the captured stderr"
        )

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def wait_for_processors() -> None:
    """Return when a second of work is not disturbed, or after a minute."""
    deadline = time.monotonic() + CALM_S
    while time.monotonic() < deadline:
        initial_times, end = processor_time(), time.monotonic() + 1
        while time.monotonic() < end:
            pass
        if stolen_since(initial_times) < STARVED:
            return
        time.sleep(2)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Look at the processors before the first test."""
    session.config.stash[PROCESSORS] = processor_time()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the share of stolen time, and every test that was run again with its first failure, passed or not."""
    if (share := stolen_since(config.stash[PROCESSORS])) >= STARVED:
        terminalreporter.write_line(
            f"the host of this machine gave {share:.0%} of the processors' time to others"
        )
    reports = [report for kind in terminalreporter.stats.values() for report in kind]
    rerun_notes = {
        report.nodeid: note
        for report in reports
        for name, note in getattr(report, "sections", ())
        if name == PROCESSORS_SECTION
    }
    failed = {
        report.nodeid
        for kind in ("failed", "error")
        for report in terminalreporter.stats.get(kind, ())
    }
    if rerun_notes:
        terminalreporter.section(
            f"{len(rerun_notes)} of at most {MOST_RERUNS} tests run again on a starved host",
            yellow=True,
        )
    for nodeid, note in rerun_notes.items():
        terminalreporter.write_line(
            f"{'FAILED TWICE' if nodeid in failed else 'run again'}: {nodeid} {note}"
        )


# ---------------------------------------------------------------------------------------------------------------
# Order and choice
# ---------------------------------------------------------------------------------------------------------------
def tier(path: Path) -> int:
    """Return the position of a test file's tier: cheap and general first."""
    first = path.relative_to(ROOT).parts[0] if path.is_relative_to(ROOT) else ""
    return TIERS.index(first) if first in TIERS else len(TIERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort tests by tier, and skip device tests where no accelerator is present."""
    items.sort(key=lambda item: tier(item.path))
    on_device = [item for item in items if item.get_closest_marker("device")]
    if on_device and not has_accelerator():
        for item in on_device:
            item.add_marker(pytest.mark.skip(reason="no accelerator on this machine"))


def pytest_collection_finish() -> None:
    """Leave out of every later garbage collection what importing all test files has made: tests collect often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def preloaded(request: pytest.FixtureRequest) -> None:
    """Import the packages that a file names in PRELOAD once in the process that forks the pool's workers."""
    if names := getattr(request.module, "PRELOAD", ()):
        request.getfixturevalue("rank_pool").preload(*names)


@pytest.fixture(autouse=True, scope="module")
def lean_collections(request: pytest.FixtureRequest) -> None:
    """Do the same before each file with what the tests before it have imported."""
    stash = request.config.stash
    if len(sys.modules) > stash.get(NUM_MODULES, 0):
        stash[NUM_MODULES] = len(sys.modules)
        gc.collect()
        gc.freeze()


def has_accelerator() -> bool:
    """Say whether torch sees an accelerator; asked only when a device test was collected."""
    torch = pytest.importorskip("torch")
    available: Callable[[], bool] = torch.accelerator.is_available
    return available()
