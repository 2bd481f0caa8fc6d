"""Training from a notebook: the function runs in new processes; their output and its result return to the cell.

Nothing is forked, so CUDA may already be initialised in the notebook, and a failed or repeated cell leaves no processes behind.
"""

from __future__ import annotations

import codecs
import inspect
import linecache
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from os import getpid
from pathlib import Path
from typing import Any, Final

import cloudpickle

from hasten.errors import LaunchError
from hasten.launch import failure as verdict
from hasten.launch.checkin import CELL, SOURCE
from hasten.launch.run import PARENT_PID
from hasten.runtime import env as environment
from hasten.runtime.topology import Topology

CALL: Final = "call.pkl"
RESULT: Final = "result.pkl"


def run(folder: Path) -> None:
    """Call the notebook's function; the first rank writes its return value to the folder."""
    # Written by the notebook's process into a folder that only its user can open.
    function, args, sources = pickle.loads((folder / CALL).read_bytes())
    linecache.cache.update(
        {name: (len(lines), None, lines, name) for name, lines in sources.items()}
    )
    result = function(*args)
    if Topology.from_env(environment.snapshot()).is_main:
        _keep(result, folder / RESULT)


def _keep(result: object, path: Path) -> None:
    try:
        data = cloudpickle.dumps(result)
    except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
        raise LaunchError(
            f"the function returned a {type(result).__qualname__}, which cannot be sent back to the notebook ({error}). "
            f"Return plain data or tensors, or save it to a file."
        ) from error
    draft = path.with_suffix(".draft")
    draft.write_bytes(data)
    draft.replace(path)


_STOP_S: Final = 25.0
_VERDICT: Final = "verdict.txt"
# Launcher settings in error messages, and their names as arguments of `notebook_launcher`.
_NAMES_HERE: Final = (
    ("--main_process_ip", "master_addr"),
    ("--machine_rank", "node_rank"),
    ("num_machines", "num_nodes"),
)


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str | None = None,
    use_port: int | str | None = None,
    master_addr: str | None = None,
    node_rank: int | None = None,
    num_nodes: int = 1,
    rdzv_backend: str | None = None,
    rdzv_endpoint: str | None = None,
    rdzv_conf: Mapping[str, Any] | str | None = None,
    rdzv_id: str | None = None,
    max_restarts: int = 0,
    monitor_interval: float | None = None,
    config_file: str | None = None,
    cpu: bool = False,
) -> Any:
    """Run `function(*args)` in `num_processes` new processes, and return its result on the first rank.

    Settings that are not given are read from the settings file, as under `hasten launch`; without `num_processes` every
    device gets a process. On several machines run the same cell on each, with `num_nodes` and `master_addr`;
    `num_processes` then counts the processes of the cell's machine, and machines other than the first return None.
    Raises: LaunchError when a process of any machine fails (its traceback is printed in the cell), when the rendezvous
    fails, or when the function or its result cannot be pickled.
    """
    has_several_machines = num_nodes > 1
    flags = _flags(
        num_processes=None if has_several_machines else num_processes,
        processes_per_machine=num_processes if has_several_machines else None,
        mixed_precision=mixed_precision,
        main_process_port=use_port,
        main_process_ip=master_addr,
        machine_rank=node_rank if has_several_machines or node_rank else None,
        num_machines=num_nodes if has_several_machines else None,
        rdzv_backend=rdzv_backend,
        rdzv_endpoint=rdzv_endpoint or None,
        rdzv_conf=_pairs(rdzv_conf),
        rdzv_id=rdzv_id,
        max_restarts=max_restarts or None,
        monitor_interval=monitor_interval,
        config_file=config_file,
        cpu="true" if cpu else None,
        quiet=None if has_several_machines else "true",
    )
    with tempfile.TemporaryDirectory(prefix="hasten-notebook-") as folder:
        home = Path(folder)
        (home / CALL).write_bytes(_packed(function, tuple(args)))
        (home / SOURCE).write_text(_source_of(function))
        command = [
            sys.executable,
            "-m",
            "hasten.cli.main",
            "launch",
            *flags,
            "-m",
            CELL,
            folder,
        ]
        code = _run(command, home / _VERDICT)
        if code != 0:
            raise LaunchError(_failure_words(home / _VERDICT, code))
        result = home / RESULT
        # Written by the process that this call started, into a folder that only this user can open.
        return pickle.loads(result.read_bytes()) if result.exists() else None


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> Any:
    """Run `function(*args)` in `num_processes` CPU processes and return the first rank's result, for tests."""
    return notebook_launcher(function, args, num_processes=num_processes, cpu=True)


def _flags(**settings: object) -> list[str]:
    return [
        f"--{name}={value}" for name, value in settings.items() if value is not None
    ]


def _pairs(conf: Mapping[str, Any] | str | None) -> str | None:
    if not conf:
        return None
    if isinstance(conf, str):
        return conf
    return ",".join(f"{name}={value}" for name, value in conf.items())


def _packed(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return bytes(cloudpickle.dumps((function, args, _cell_sources())))
    except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
        name = getattr(function, "__qualname__", repr(function))
        raise LaunchError(
            f"the function {name} or its arguments cannot be sent to the new processes ({error}): they use an object that cannot be "
            "pickled. Create it inside the function, or pass plain data."
        ) from error


def _source_of(function: Callable[..., Any]) -> str:
    """Return the function's source, which other machines compare with theirs; empty if it is not available."""
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""


def _cell_sources() -> dict[str, list[str]]:
    """Return the source of the notebook's cells, which exist in no file, so that remote tracebacks can show it."""
    entries = [
        (name, entry)
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None
    ]
    return {name: entry[2] for name, entry in entries if not Path(name).exists()}


def _run(command: Sequence[str], verdict_file: Path) -> int:
    """Run the launcher and copy its output into the cell; Ctrl-C and the stop button end it."""
    env = environment.snapshot()
    folders = [entry for entry in sys.path if entry]
    variables = {
        "PYTHONPATH": ":".join(dict.fromkeys(folders)),
        PARENT_PID: str(getpid()),
        verdict.VARIABLE: str(verdict_file),
    }
    with subprocess.Popen(
        command,
        env={**env, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as launcher:
        try:
            _copy_output(launcher)
            return launcher.wait()
        # on any interruption of the cell, stop the processes first
        except BaseException:
            _stop(launcher)
            raise


def _copy_output(launcher: subprocess.Popen[bytes]) -> None:
    """Copy output in chunks rather than lines, so that progress bars update."""
    assert launcher.stdout is not None, "the launcher's output is piped"
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    while piece := launcher.stdout.read1(65536):  # type: ignore[attr-defined]  # a buffered reader
        sys.stdout.write(decode(piece))
        sys.stdout.flush()


def _stop(launcher: subprocess.Popen[bytes]) -> None:
    launcher.send_signal(signal.SIGTERM)
    try:
        launcher.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def _failure_words(verdict_file: Path, code: int) -> str:
    """Return the launcher's reason for a failed launch, with settings renamed to their notebook arguments."""
    if not verdict_file.exists():
        return f"the processes ended with exit code {code} without reporting an error; see the output above."
    words = verdict_file.read_text()
    names = [
        f"{setting_name} is {argument_name}"
        for setting_name, argument_name in _NAMES_HERE
        if setting_name in words
    ]
    return f"{words} (In a notebook {', '.join(names)}.)" if names else words


if __name__ == "__main__":
    run(Path(sys.argv[1]))
