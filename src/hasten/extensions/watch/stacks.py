"""Stack of a thread, and the activity of its rank derived from it."""

from __future__ import annotations

import gc
import linecache
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, Literal

from hasten.comm.collective_log import LIBRARIES

Kind = Literal[
    "collective",
    "backward",
    "forward",
    "device",
    "loader",
    "checkpoint",
    "compiling",
    "user",
    "ending",
    "over",
]
MAY_WAIT: Final = ("backward", "forward", "device")
"""Kinds in which a rank either computes or waits for others; its CPU time distinguishes them."""
_WAITING_FILES: Final = (
    "/torch/distributed/",
    "/torch/nn/parallel/",
    "/torch/autograd/",
    "/torch/_tensor.py",
    "/torch/_ops.py",
    "/torch/cuda/",
)
"""Files whose calls wait for other ranks in native code; calls from other files load, build or compute something."""

_STDLIB: Final = tuple(
    f"{sysconfig.get_paths()[name]}/" for name in ("stdlib", "platstdlib")
)
_LIBRARY_PREFIXES: Final = (*LIBRARIES, *_STDLIB, "<frozen ")
_GENERIC_FUNCTIONS: Final = frozenset(
    {
        "wrapper",
        "inner",
        "decorate_context",
        "__call__",
        "__enter__",
        "__exit__",
        "__next__",
        "_first",
    }
)
_MOST_CALLS: Final = 200
_FACADE_FILE: Final = "/hasten/accelerator/facade.py"

# (part of the path, kind of a rank with a call from there); the first match wins
_KINDS_BY_PATH: Final[tuple[tuple[str, Kind], ...]] = (
    ("/hasten/comm/", "collective"),
    ("/torch/distributed/distributed_c10d.py", "collective"),
    ("/torch/distributed/_functional_collectives.py", "collective"),
    ("/torch/_inductor/", "compiling"),
    ("/torch/_dynamo/convert_frame.py", "compiling"),
    ("/hasten/checkpoint/", "checkpoint"),
    ("/hasten/accelerator/saving.py", "checkpoint"),
    ("/torch/serialization.py", "checkpoint"),
    ("/torch/distributed/checkpoint/", "checkpoint"),
    ("/torch/utils/data/", "loader"),
    ("/hasten/data/", "loader"),
    ("/torch/distributed/fsdp/", "forward"),
    ("/torch/nn/parallel/distributed.py", "forward"),
    ("/torch/autograd/graph.py", "backward"),
    ("/torch/_tensor.py", "backward"),
    ("/torch/cuda/", "device"),
)


@dataclass(frozen=True, slots=True)
class StackCall:
    """One frame of a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class StackFrame:
    """Activity of a thread, and the line of the user's code that started it."""

    kind: Kind
    call: str
    """The function called by the user's code, such as gather; empty if the thread is in the user's code itself."""
    file: str
    line: int
    function: str
    """The user's function."""
    barrier: bool = False
    in_dataset: bool = False
    """True if the user's code is called by a DataLoader."""

    @property
    def site(self) -> str:
        """`file:line` with a short path."""
        return f"{shorten_path(self.file)}:{self.line}"


def _frame_of(thread_id: int) -> FrameType | None:
    """Return the innermost frame of a thread; None if it has ended.

    CPython 3.11 lists the frames with its lock of threads held. A garbage collection in that moment may run a finalizer
    that releases the interpreter's lock to a thread that is starting or ending, which then waits for the lock of threads:
    a deadlock. Collection is therefore off while the frames are listed.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread_id)
    finally:
        if collecting:
            gc.enable()


def calls_of(thread_id: int) -> list[StackCall]:
    """Return the calls of a thread, innermost first; empty if it has ended."""
    frame = _frame_of(thread_id)
    stack_calls: list[StackCall] = []
    while frame is not None and len(stack_calls) < _MOST_CALLS:
        stack_calls.append(
            StackCall(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        )
        frame = frame.f_back
    return stack_calls


def is_over(calls: Sequence[StackCall]) -> bool:
    """Return whether the main thread has run its program to the end and waits for other threads."""
    return any(
        stack_call.function == "_shutdown" and stack_call.file.endswith("/threading.py")
        for stack_call in calls
    )


def place_of(calls: Sequence[StackCall]) -> StackFrame:
    """Return the activity of the thread with these calls."""
    user_index = next(
        (i for i, stack_call in enumerate(calls) if not is_library(stack_call.file)),
        max(0, len(calls) - 1),
    )
    user_call = calls[user_index] if calls else StackCall("?", 0, "?")
    inner_calls = []
    for stack_call in calls[:user_index]:
        if not stack_call.file.startswith("<"):
            inner_calls.append(stack_call)
    kind: Kind = "user"
    if is_over(calls):
        kind = "over"
    elif inner_calls:
        inner_files = "\n".join(stack_call.file for stack_call in inner_calls)
        for path_part, kind_of_path in reversed(_KINDS_BY_PATH):
            if path_part in inner_files:
                kind = kind_of_path
        if kind in MAY_WAIT and not any(
            path_part in calls[0].file for path_part in _WAITING_FILES
        ):
            kind = "user"
        if kind != "collective" and any(
            stack_call.function == "end_training"
            and stack_call.file.endswith(_FACADE_FILE)
            for stack_call in inner_calls
        ):
            kind = "ending"
    outer_calls = calls[user_index:]
    if kind == "user" and any(
        "/hasten/checkpoint/" in stack_call.file for stack_call in outer_calls
    ):
        kind = "checkpoint"  # the user's state_dict(), called by a save
    named_functions = []
    for stack_call in inner_calls:
        if stack_call.function not in _GENERIC_FUNCTIONS:
            named_functions.append(stack_call.function)
    return StackFrame(
        kind,
        named_functions[-1] if named_functions and kind != "user" else "",
        user_call.file,
        user_call.line,
        user_call.function,
        barrier=any(
            stack_call.file.endswith("/hasten/comm/rollcall.py")
            for stack_call in inner_calls
        ),
        in_dataset=kind == "user"
        and any("/torch/utils/data/" in stack_call.file for stack_call in outer_calls),
    )


def is_library(file_name: str) -> bool:
    """Return whether a file is not the user's: part of Python, torch, hasten or an installed package."""
    return (
        file_name.startswith(_LIBRARY_PREFIXES)
        or "/site-packages/" in file_name
        or "/dist-packages/" in file_name
    )


def shorten_path(file_name: str) -> str:
    """Return a short path: from the package name for packages, else relative to the working folder if below it."""
    for packages_folder in ("/site-packages/", "/dist-packages/"):
        if packages_folder in file_name:
            return file_name.rpartition(packages_folder)[2]
    if file_name.startswith(LIBRARIES[0]):
        return file_name[len(LIBRARIES[0]) - len("hasten/") :]
    try:
        return str(Path(file_name).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file_name


def source_line(file_name: str, line_number: int) -> str:
    """Return a source line without its comment; empty if the file cannot be read."""
    text = linecache.getline(file_name, line_number).partition("  # ")[0].strip()
    return text if len(text) <= 80 else f"{text[:77]}…"


def text_of(calls: Sequence[StackCall]) -> list[str]:
    """Return the stack as lines, outermost first as in a traceback, starting at the first call of the user's code."""
    outermost_first = list(reversed(calls))
    first_user_index = next(
        (
            i
            for i, stack_call in enumerate(outermost_first)
            if not is_library(stack_call.file)
        ),
        0,
    )
    return [
        f"{shorten_path(stack_call.file)}:{stack_call.line} in {stack_call.function}"
        for stack_call in outermost_first[first_user_index:]
    ]
