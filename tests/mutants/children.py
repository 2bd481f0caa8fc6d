"""Pytest in forked children: with a mutated module, or with a record of the lines that each test executes."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Final, Generic, TypeVar

import pytest

from tests.mutants.mutate import Mutant

MAX_MEMORY_BYTES: Final = 8 << 30
"""Of one child: a mutant may append to a list forever."""
POLL_INTERVAL_S: Final = 0.02
OPTIONS: Final = (
    "--quiet",
    *("-p", "no:cacheprovider", "-p", "no:xdist"),
    # the mark of distributed tests, where hasten is on the path and not installed
    *("-p", "hasten.testing.plugin"),
    # rewriting assertions would import the mutated module itself
    "--assert=plain",
    *("-m", "not slow and not exhaustive and not timed"),
)
ALL_PASSED: Final = 0
SOME_FAILED: Final = 1
NOTHING_RAN: Final = 5


@dataclass(frozen=True, slots=True)
class TestRecord:
    """Outcome of a test on the unchanged modules, and the lines that it executed of each."""

    __test__ = False

    name: str
    seconds: float
    has_passed: bool
    has_failed: bool
    """A skipped test has done neither."""
    lines: Mapping[str, Collection[int]]
    """By the path of the module."""

    @property
    def path(self) -> str:
        return self.name.partition("::")[0]


# ---------------------------------------------------------------------------------------------------------------
# In the child
# ---------------------------------------------------------------------------------------------------------------
class LineRecorder:
    """Pytest plugin that records the lines of some modules that each test executes."""

    def __init__(self, modules: Iterable[Path]) -> None:
        self._modules = frozenset(map(str, modules))
        self._lines: dict[str, set[int]] = {}
        self._seconds: dict[str, float] = {}
        self._lines_of_tests: dict[str, dict[str, list[int]]] = {}
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    # Any: the types of trace functions are recursive
    def _trace_call(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in self._modules:
            return None
        lines = self._lines.setdefault(frame.f_code.co_filename, set())
        lines.add(frame.f_lineno)

        def trace_line(frame: FrameType, event: str, argument: object) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
            return trace_line

        return trace_line

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool, bool]:
        self._lines = {}
        started = time.monotonic()
        sys.settrace(self._trace_call)
        threading.settrace(self._trace_call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            name = _name_of(item)
            self._seconds[name] = time.monotonic() - started
            self._lines_of_tests[name] = {
                path: sorted(lines) for path, lines in self._lines.items()
            }

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "call" and report.passed:
            self._passed.add(_name_of(item))
        if report.failed:
            self._failed.add(_name_of(item))
        return report

    def write(self, path: Path) -> None:
        """Write one entry a test."""
        records = [
            [
                name,
                self._seconds[name],
                name in self._passed - self._failed,
                name in self._failed,
                lines,
            ]
            for name, lines in self._lines_of_tests.items()
        ]
        path.write_text(json.dumps(records), "utf-8")


class TestSelection:
    """Pytest plugin that runs the named tests alone: files and tests in the order of their time."""

    __test__ = False

    def __init__(self, records: Sequence[TestRecord]) -> None:
        seconds_of_files: dict[str, float] = defaultdict(float)
        for record in records:
            seconds_of_files[record.path] += record.seconds
        self._order = {
            record.name: (seconds_of_files[record.path], record.path, record.seconds)
            for record in records
        }

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen_items = [item for item in items if _name_of(item) in self._order]
        items[:] = sorted(chosen_items, key=lambda item: self._order[_name_of(item)])


def _name_of(item: pytest.Item) -> str:
    """Return the absolute path of a test's file, and its name with parameters."""
    return f"{item.path}::{item.nodeid.partition('::')[2]}"


class MutatedModule(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Import hook that gives one module other code."""

    def __init__(self, name: str, path: Path, code: CodeType) -> None:
        self._name = name
        self._path = path
        self._code = code

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for the mutated module, None for all others."""
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._path, loader=self)

    def get_code(self, fullname: str) -> CodeType:
        """Return the mutated code."""
        return self._code

    def get_source(self, fullname: str) -> str:
        """Return the unchanged source."""
        return self._path.read_text("utf-8")

    def is_package(self, fullname: str) -> bool:
        """Return False: only modules are mutated."""
        return False


def record_lines(
    tests: Sequence[Path], modules: Iterable[Path], output: Path, folder: Path
) -> int:
    """Run all tests and write their records; return 0 also if some tests failed, which the records tell."""
    recorder = LineRecorder(modules)
    arguments = ["--continue-on-collection-errors", *map(str, tests)]
    exit_code = _run_pytest(arguments, recorder, folder)
    recorder.write(output)
    return ALL_PASSED if exit_code == SOME_FAILED else exit_code


def run_mutant(
    mutant: Mutant, module: str, records: Sequence[TestRecord], folder: Path
) -> int:
    """Run tests on a mutated module until one fails; return pytest's exit status."""
    sys.meta_path.insert(0, MutatedModule(module, mutant.path, mutant.code()))
    files = dict.fromkeys(record.path for record in records)
    return _run_pytest(["--exitfirst", *files], TestSelection(records), folder)


def _run_pytest(arguments: Iterable[str], plugin: object, folder: Path) -> int:
    # children at the same time would remove each other's temporary files
    files_option = f"--basetemp={folder / 'files'}"
    return int(pytest.main([*OPTIONS, files_option, *arguments], plugins=[plugin]))


def read_records(path: Path) -> list[TestRecord]:
    """Return the records that `record_lines` wrote."""
    return [
        TestRecord(name, seconds, has_passed, has_failed, lines)
        for name, seconds, has_passed, has_failed, lines in json.loads(
            path.read_text("utf-8")
        )
    ]


# ---------------------------------------------------------------------------------------------------------------
# In the parent
# ---------------------------------------------------------------------------------------------------------------
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job(Generic[T]):
    """Work for a forked child, and what it is about."""

    subject: T
    work: Callable[[Path], int]
    """Returns the exit status; is given a folder for temporary files."""
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Ending(Generic[T]):
    """A child's exit status, None if it was killed at its time limit, and its seconds."""

    subject: T
    exit_code: int | None
    seconds: float
    log: str
    """The last of what the child printed."""


@dataclass(frozen=True, slots=True)
class _Child(Generic[T]):
    job: Job[T]
    pid: int
    folder: Path
    started: float


def run_jobs(jobs: Iterable[Job[T]], num_workers: int) -> Generator[Ending[T]]:
    """Run jobs in forked children, `num_workers` at a time; yield each one's ending as it comes."""
    waiting = iter(jobs)
    children: list[_Child[T]] = []
    try:
        while True:
            while len(children) < num_workers:
                job = next(waiting, None)
                if job is None:
                    break
                children.append(_start(job))
            if not children:
                return
            for child in list(children):
                ending = _poll(child)
                if ending is not None:
                    children.remove(child)
                    yield ending
            time.sleep(POLL_INTERVAL_S)
    finally:
        for child in children:
            _end(child)


def _start(job: Job[T]) -> _Child[T]:
    folder = Path(tempfile.mkdtemp(prefix="mutant-"))
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        exit_code = 3
        try:
            _prepare_child(folder)
            exit_code = job.work(folder)
        # whatever a mutant raises, the copy of the parent must end here
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code)
    return _Child(job, pid, folder, time.monotonic())


def _prepare_child(folder: Path) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    silence = os.open(os.devnull, os.O_RDWR)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(silence, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(silence)
    os.close(log)
    # a parent that is a test has its output captured
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def _poll(child: _Child[T]) -> Ending[T] | None:
    ended_pid, status = os.waitpid(child.pid, os.WNOHANG)
    seconds = time.monotonic() - child.started
    if not ended_pid and seconds < child.job.timeout_s:
        return None
    log = (child.folder / "log").read_text("utf-8", "replace")[-4000:]
    exit_code = os.waitstatus_to_exitcode(status) if ended_pid else None
    _end(child, is_running=not ended_pid)
    return Ending(child.job.subject, exit_code, seconds, log)


def _end(child: _Child[T], is_running: bool = True) -> None:
    """Kill a child with the processes that it started, and remove its files."""
    with suppress(ProcessLookupError):  # nothing of the group is left
        os.killpg(child.pid, signal.SIGKILL)
    if is_running:
        os.waitpid(child.pid, 0)
    shutil.rmtree(child.folder, ignore_errors=True)
