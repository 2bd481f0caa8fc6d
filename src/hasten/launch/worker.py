"""Entry point of a launched process: runs the user's program and records its failure. Does not import torch.

Run as `python -m hasten.launch.worker [-m] program args…`. The program sees the same environment as under plain Python:
`__main__`, `sys.argv`, `sys.path[0]`, `__file__`. An uncaught exception is not printed by every rank at once but written
to the file named in TORCHELASTIC_ERROR_FILE; the launcher prints the first of them when all ranks have ended.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, TracebackType
from typing import Final

from hasten.errors import HastenError
from hasten.launch.failure import PREEMPTED
from hasten.launch.guard import SAVING
from hasten.runtime import env as environment
from hasten.runtime import launcher_files as last_words
from hasten.runtime.launcher_files import ERROR_FILE

LAUNCHER_PID: Final = "HASTEN_LAUNCHER_PID"

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], None]

_MAX_TRACEBACK_CHARS = 60_000
_PACKAGE: Final = Path(__file__).parent.parent


def main() -> None:
    """Run the program named on the command line."""
    program_args = sys.argv[1:]
    variables = environment.snapshot()
    if error_file := variables.get(ERROR_FILE):
        sys.excepthook = recording_hook(Path(error_file), sys.excepthook)
    else:
        sys.excepthook = trimming_hook(sys.excepthook)
    _enable_faulthandler()
    _write_whole_lines()
    if launcher_pid := variables.get(LAUNCHER_PID):
        die_with(int(launcher_pid))
    try:
        if program_args[:1] == ["-m"]:
            _run_module(program_args[1], program_args[2:])
        else:
            _run_script(program_args[0], program_args[1:])
    except SystemExit as end:
        if end.code == PREEMPTED:
            _keep_exit_code()
        raise


def _keep_exit_code() -> None:
    """Ignore further stop signals, which would replace the exit code of a saved run.

    Python restores the default handlers at exit; schedulers send the signals repeatedly, and the launcher forwards them.
    """
    for number in SAVING:
        signal.signal(number, signal.SIG_IGN)


def recording_hook(path: Path, fallback: Hook) -> Hook:
    """Return an excepthook that writes the exception to `path` instead of printing it; if writing fails, it prints."""

    def record_error(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return  # the launcher was interrupted and reports it
        try:
            write_error(path, error, without_bootstrap(trace, error))
        except OSError:
            fallback(kind, error, trace)

    return record_error


def trimming_hook(printing: Hook) -> Hook:
    """Return an excepthook that prints the exception as plain Python would, without hasten's frames."""

    def trim_traceback(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        user_trace = without_bootstrap(trace, error)
        printing(kind, error.with_traceback(user_trace), user_trace)

    return trim_traceback


def write_error(path: Path, error: BaseException, trace: TracebackType | None) -> None:
    """Write `error` in the format read by torch's elastic agent, with hasten's additional fields."""
    # Without a frame of the user's program the message is sufficient; the cause is in hasten or runpy.
    traceback_text = "".join(
        traceback.format_exception(type(error), error, trace, chain=trace is not None)
    )
    if len(traceback_text) > _MAX_TRACEBACK_CHARS:
        half_chars = _MAX_TRACEBACK_CHARS // 2
        traceback_text = f"{traceback_text[:half_chars]}\n  … {len(traceback_text) - 2 * half_chars} characters left out …\n{traceback_text[-half_chars:]}"
    # An error that all ranks raise together has a `__cause__` only on the ranks that failed themselves.
    is_echo = (
        isinstance(error, HastenError) and error.agreed and error.__cause__ is None
    )
    last_words.write_error(
        path,
        "".join(traceback.format_exception_only(type(error), error)).strip(),
        traceback_text,
        echo=is_echo,
    )


def _enable_faulthandler() -> None:
    """Print the Python stack on a crash in native code, if stderr is a real file."""
    try:
        faulthandler.enable()
    # stderr without a descriptor: only the extra stack is lost
    except (OSError, ValueError, AttributeError):
        return


def _write_whole_lines() -> None:
    """Flush output line by line: immediately, and without mixing ranks within a line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def die_with(parent_pid: int) -> None:
    """Ask the kernel to end this process when its parent is killed, so that no process is orphaned (Linux)."""
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent died before the call above
        os.kill(os.getpid(), signal.SIGTERM)


def without_bootstrap(
    trace: TracebackType | None, error: BaseException
) -> TracebackType | None:
    """Return the traceback without the leading frames of hasten, of runpy and of the import system.

    None if no other frame is left and the message explains the problem with the program: it cannot be compiled, found or read,
    or hasten rejected it.
    """
    user_trace = trace
    while user_trace is not None and _is_bootstrap(
        user_trace.tb_frame.f_code.co_filename
    ):
        user_trace = user_trace.tb_next
    explains_itself = isinstance(
        error, SyntaxError | ImportError | OSError | HastenError
    )
    return user_trace or (None if explains_itself else trace)


def _is_bootstrap(file: str) -> bool:
    return file.startswith(("<frozen runpy", "<frozen importlib")) or Path(
        file
    ).is_relative_to(_PACKAGE)


def _run_script(script: str, args: list[str]) -> None:
    script_path = Path(script)
    if script_path.is_dir() or script_path.suffix in (".zip", ".pyz", ".pyc"):
        sys.argv[:] = [script, *args]
        _set_first_path(
            str(script_path.resolve().parent)
            if script_path.suffix == ".pyc"
            else script
        )
        runpy.run_path(script, run_name="__main__")
        return
    absolute_path = str(script_path.absolute())
    try:
        program_code = compile(
            script_path.read_bytes(), absolute_path, "exec", dont_inherit=True
        )
    except (SyntaxError, ValueError) as error:
        # such as for NUL characters: Python does not name the file
        if not getattr(error, "filename", None):
            error.add_note(f"in {absolute_path}")
        raise
    sys.argv[:] = [script, *args]
    _set_first_path(str(script_path.resolve().parent))
    _run_as_main(program_code, absolute_path)


def _set_first_path(folder: str) -> None:
    # under -P and PYTHONSAFEPATH plain Python adds no folder either
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _run_as_main(code: CodeType, script: str) -> None:
    """Execute `code` in the real `__main__` module, without this file's names, so that pickling and spawning work."""
    main_module = sys.modules["__main__"]
    namespace = vars(main_module)
    kept_names = {"__name__": "__main__", "__builtins__": namespace["__builtins__"]}
    loader = SourceFileLoader("__main__", script)
    namespace.clear()
    namespace.update(
        kept_names,
        __loader__=loader,
        __file__=script,
        __spec__=None,
        __package__=None,
        __doc__=None,
        __cached__=None,
    )
    exec(code, namespace)


def _run_module(name: str, args: list[str]) -> None:
    sys.argv[:] = [name, *args]
    _set_first_path(str(Path.cwd()))
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    # Run the module under its real name: `__main__` is about to become the user's program.
    from hasten.launch import worker

    worker.main()
