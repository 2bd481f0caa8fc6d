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
    function, args, cell_sources = pickle.loads((folder / CALL).read_bytes())
    linecache.cache.update(
        {
            file_name: (len(lines), None, lines, file_name)
            for file_name, lines in cell_sources.items()
        }
    )
    return_value = function(*args)
    if Topology.from_env(environment.snapshot()).is_main:
        _write_result(return_value, folder / RESULT)


def _write_result(return_value: object, result_path: Path) -> None:
    try:
        pickled_value = cloudpickle.dumps(return_value)
    except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
        raise LaunchError(
            f"the function returned a {type(return_value).__qualname__}, which cannot be sent back to the notebook ({error}). "
            f"Return plain data or tensors, or save it to a file."
        ) from error
    draft_path = result_path.with_suffix(".draft")
    draft_path.write_bytes(pickled_value)
    draft_path.replace(result_path)


_STOP_TIMEOUT_S: Final = 25.0
_VERDICT: Final = "verdict.txt"
# Launcher settings in error messages, and their names as arguments of `notebook_launcher`.
_ARGUMENT_NAMES: Final = (
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
    flags = _launch_flags(
        num_processes=None if has_several_machines else num_processes,
        processes_per_machine=num_processes if has_several_machines else None,
        mixed_precision=mixed_precision,
        main_process_port=use_port,
        main_process_ip=master_addr,
        machine_rank=node_rank if has_several_machines or node_rank else None,
        num_machines=num_nodes if has_several_machines else None,
        rdzv_backend=rdzv_backend,
        rdzv_endpoint=rdzv_endpoint or None,
        rdzv_conf=_format_options(rdzv_conf),
        rdzv_id=rdzv_id,
        max_restarts=max_restarts or None,
        monitor_interval=monitor_interval,
        config_file=config_file,
        cpu="true" if cpu else None,
        quiet=None if has_several_machines else "true",
    )
    with tempfile.TemporaryDirectory(prefix="hasten-notebook-") as folder:
        job_folder = Path(folder)
        (job_folder / CALL).write_bytes(_pickle_call(function, tuple(args)))
        (job_folder / SOURCE).write_text(_source_of(function))
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
        exit_code = _run_launcher(command, job_folder / _VERDICT)
        if exit_code != 0:
            raise LaunchError(_failure_words(job_folder / _VERDICT, exit_code))
        result_path = job_folder / RESULT
        # Written by the process that this call started, into a folder that only this user can open.
        if result_path.exists():
            return pickle.loads(result_path.read_bytes())
        return None


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> Any:
    """Run `function(*args)` in `num_processes` CPU processes and return the first rank's result, for tests."""
    return notebook_launcher(function, args, num_processes=num_processes, cpu=True)


def _launch_flags(**settings: object) -> list[str]:
    launch_flags = []
    for flag_name, flag_value in settings.items():
        if flag_value is not None:
            launch_flags.append(f"--{flag_name}={flag_value}")
    return launch_flags


def _format_options(conf: Mapping[str, Any] | str | None) -> str | None:
    if not conf:
        return None
    if isinstance(conf, str):
        return conf
    return ",".join(
        f"{option_name}={option_value}" for option_name, option_value in conf.items()
    )


def _pickle_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return bytes(cloudpickle.dumps((function, args, _cell_sources())))
    except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
        function_name = getattr(function, "__qualname__", repr(function))
        raise LaunchError(
            f"the function {function_name} or its arguments cannot be sent to the new processes ({error}): they use an object that cannot be "
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
    source_lines = {}
    for file_name, cached_entry in linecache.cache.items():
        if len(cached_entry) != 4 or cached_entry[1] is not None:
            continue
        if not Path(file_name).exists():
            source_lines[file_name] = cached_entry[2]
    return source_lines


def _run_launcher(command: Sequence[str], verdict_file: Path) -> int:
    """Run the launcher and copy its output into the cell; Ctrl-C and the stop button end it."""
    env = environment.snapshot()
    path_folders = [folder for folder in sys.path if folder]
    variables = {
        "PYTHONPATH": ":".join(dict.fromkeys(path_folders)),
        PARENT_PID: str(getpid()),
        verdict.VERDICT_VARIABLE: str(verdict_file),
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
            _stop_launcher(launcher)
            raise


def _copy_output(launcher: subprocess.Popen[bytes]) -> None:
    """Copy output in chunks rather than lines, so that progress bars update."""
    assert launcher.stdout is not None, "the launcher's output is piped"
    decode_chunk = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    while output_chunk := launcher.stdout.read1(65536):  # type: ignore[attr-defined]  # a buffered reader
        sys.stdout.write(decode_chunk(output_chunk))
        sys.stdout.flush()


def _stop_launcher(launcher: subprocess.Popen[bytes]) -> None:
    launcher.send_signal(signal.SIGTERM)
    try:
        launcher.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def _failure_words(verdict_file: Path, code: int) -> str:
    """Return the launcher's reason for a failed launch, with settings renamed to their notebook arguments."""
    if not verdict_file.exists():
        return f"the processes ended with exit code {code} without reporting an error; see the output above."
    reason_text = verdict_file.read_text()
    renamed_settings = []
    for setting_name, argument_name in _ARGUMENT_NAMES:
        if setting_name in reason_text:
            renamed_settings.append(f"{setting_name} is {argument_name}")
    if renamed_settings:
        return f"{reason_text} (In a notebook {', '.join(renamed_settings)}.)"
    return reason_text


if __name__ == "__main__":
    run(Path(sys.argv[1]))
