"""Helpers for testing scripts: launch commands, skips, temporary folders."""

import inspect
import io
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import make_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import accelerate
from accelerate._impl.environment import packages as imports
from accelerate._impl.environment.variables import parse_flag_from_env
from accelerate._impl.environment.versions import compare_versions
from accelerate._impl.surface.messages import message
from accelerate._impl.tensors import gather
from accelerate._impl.views.state import AcceleratorState, PartialState
from hasten.optional import available, need
from hasten.runtime.devices import choose_device

# Any in this file: tests and their arguments.
_run_slow_tests = parse_flag_from_env("RUN_SLOW")


def get_backend() -> tuple[str, int, Callable[..., Any]]:
    """Return the kind of device, how many there are, and what counts its allocated memory."""
    device_type = choose_device(0).type
    if device_type == "cpu":
        return "cpu", 1, lambda: 0
    return (
        device_type,
        torch.accelerator.device_count(),
        torch.accelerator.memory_allocated,
    )


torch_device, device_count, memory_allocated_func = get_backend()


def get_launch_command(**kwargs: Any) -> list[str]:
    command = ["accelerate", "launch"]
    for flag_name, flag_value in kwargs.items():
        if flag_value is not None:
            command.append(
                f"--{flag_name}"
                if flag_value is True
                else f"--{flag_name}={flag_value}"
            )
    return command


DEFAULT_LAUNCH_COMMAND = get_launch_command(
    num_processes=device_count, monitor_interval=0.1
)


def run_first(test_case: Any) -> Any:
    if available("pytest"):
        return need("pytest").mark.order(1)(test_case)
    return test_case


_LINES = [
    line.partition("|")
    for line in Path(__file__).with_suffix(".txt").read_text().splitlines()
]
_REASONS = {rule.split()[0]: reason for rule, _, reason in _LINES}


def _skip_unless(
    probe: Callable[[], bool] | str, requirement: str
) -> Callable[[Any], Any]:
    def decorate(test_case: Any) -> Any:
        if isinstance(probe, str):
            is_available = globals()[probe]
        else:
            is_available = probe
        return unittest.skipUnless(
            is_available(), _REASONS.get(requirement) or f"test requires {requirement}"
        )(test_case)

    decorate.__doc__ = f"A test that needs {requirement}."
    return decorate


def _has_devices(number: str, kinds: list[str]) -> bool:
    if not kinds[0].startswith("-"):
        has_device = torch_device in kinds
    else:
        has_device = f"-{torch_device}" not in kinds
    return has_device and number in ("any", "one" if device_count == 1 else "several")


skip = _skip_unless(lambda: False, "skip")
slow = _skip_unless(lambda: _run_slow_tests, "slow")
require_tpu = _skip_unless(
    lambda: imports.is_torch_xla_available(check_is_tpu=True), "tpu"
)
require_non_torch_xla = _skip_unless(
    lambda: not imports.is_torch_xla_available(), "no torch_xla"
)
require_fsdp2, require_tp = (
    _skip_unless(lambda: True, "FSDP2"),
    _skip_unless(lambda: True, "tensor parallelism"),
)
require_huggingface_suite = _skip_unless(
    lambda: imports.is_transformers_available() and imports.is_datasets_available(),
    "huggingface_suite",
)
require_trackers = _skip_unless(
    lambda: imports.is_wandb_available() or imports.is_tensorboard_available(),
    "a tracker",
)
for _name, _probe in vars(imports).items():
    if _name.startswith("is_") and _name.endswith("_available"):
        _what = _name.removeprefix("is_").removesuffix("_available")
        globals()[_name] = _probe  # which tests replace
        globals()[f"require_{_what}"] = _skip_unless(_name, _what)
for _what, _number, *_kinds in (rule.split() for rule, _, _ in _LINES if " " in rule):
    globals()[f"require_{_what}"] = _skip_unless(
        partial(_has_devices, _number, _kinds), _what
    )


def require_torch_min_version(test_case: Any = None, version: Any = None) -> Any:
    if test_case is None:
        return lambda case: require_torch_min_version(case, version)
    enough = compare_versions("torch", ">=", version)
    return unittest.skipUnless(enough, f"test requires torch version >= {version}")(
        test_case
    )


class TempDirTestCase(unittest.TestCase):
    """Tests with a folder, `self.tmpdir`, emptied for each."""

    clear_on_setup = True
    tmpdir: Path

    @classmethod
    def setUpClass(cls) -> None:
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        shutil.rmtree(cls.tmpdir, ignore_errors=True)

    def setUp(self) -> None:
        if self.clear_on_setup:
            for path in self.tmpdir.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()


class AccelerateTestCase(unittest.TestCase):
    def tearDown(self) -> None:
        super().tearDown()
        AcceleratorState._reset_state(True)


class MockingTestCase(unittest.TestCase):
    def add_mocks(self, mocks: Any) -> None:
        if isinstance(mocks, list | tuple):
            self.mocks = mocks
        else:
            self.mocks = [mocks]
        for mock in self.mocks:
            mock.start()
            self.addCleanup(mock.stop)


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Return whether every process has the same tensor. Ranks: every rank."""
    everyone = gather(tensor[None].clone().to(PartialState().device)).cpu()
    return all(torch.equal(rank_tensor, tensor.cpu()) for rank_tensor in everyone)


class SubprocessCallException(Exception):
    """A command failed."""


def run_command(
    command: list[str], return_stdout: bool = False, env: Any = None
) -> str | None:
    """Run a command; its output when asked. Raises: SubprocessCallException with what it said."""
    try:
        output = subprocess.check_output(
            command, stderr=subprocess.STDOUT, env=env or os.environ.copy(), text=True
        )
    except subprocess.CalledProcessError as error:
        raise SubprocessCallException(
            message("command_gave", " ".join(map(str, command)), error.output)
        ) from error
    return output if return_stdout else None


_RunOutput: Any = make_dataclass("_RunOutput", ["returncode", "stdout", "stderr"])


def _decode_lines(output: bytes) -> list[str]:
    return [line.decode(errors="replace").rstrip() for line in io.BytesIO(output)]


def execute_subprocess_async(
    cmd: list[str],
    env: Any = None,
    stdin: Any = None,
    timeout: int = 180,
    quiet: bool = False,
    echo: bool = True,
) -> Any:
    """Run a command and give its output lines; `timeout` ends nothing. Raises: RuntimeError with its errors when it fails."""
    line = " ".join(map(str, cmd))
    command = [*map(str, cmd)]
    sys.stdout.write(f"\nRunning:  {line}\n" if echo else "")
    done = subprocess.run(
        command, stdin=stdin, env=env, capture_output=True, check=False
    )
    result = _RunOutput(
        done.returncode, _decode_lines(done.stdout), _decode_lines(done.stderr)
    )
    if not quiet:
        sys.stdout.writelines(
            f"stdout: {output_line}\n" for output_line in result.stdout
        )
        sys.stderr.writelines(
            f"stderr: {output_line}\n" for output_line in result.stderr
        )
    if result.returncode > 0:
        raise RuntimeError(
            message("command_failed", line, result.returncode, "\n".join(result.stderr))
        )
    return result


def pytest_xdist_worker_id() -> int:
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def get_torch_dist_unique_port() -> int:
    return 29500 + pytest_xdist_worker_id()


def path_in_accelerate_package(*components: str) -> Path:
    return Path(inspect.getfile(accelerate)).parent.joinpath(*components)


@contextmanager
def assert_exception(
    exception_class: type[BaseException], msg: str | None = None
) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever the block raises is compared
        assert isinstance(error, exception_class), (
            f"Expected exception of type {exception_class} but got {type(error)}"
        )
        assert msg is None or msg in str(error), (
            f"Expected message '{msg}' to be in exception but got '{error}'"
        )
        return
    raise AssertionError(
        f"Expected exception of type {exception_class} but ran without issue."
    )


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with redirect_stdout(io.StringIO()) as captured:
        func(*args, **kwargs)
    return captured.getvalue()
