"""Reading and patching the process's environment, and looking at the machine."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import field, make_dataclass
from functools import lru_cache, wraps
from typing import Any

import torch

from hasten.launch.network import free_port, is_reachable
from hasten.runtime.affinity import set_affinity
from hasten.runtime.devices import pci_address
from hasten.runtime.topology import Topology

_log = logging.getLogger("accelerate.utils.environment")
# Any in this file: values of variables, and the functions and classes that decorators take.
_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE = frozenset({"n", "no", "f", "false", "off", "0"})


def environment() -> Mapping[str, str]:
    return os.environ


def str_to_bool(value: Any, to_bool: bool = False) -> int | bool:
    """1 or 0 for a word that says yes or no; with `to_bool`, True or False."""
    word = str(value).lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(f"invalid truth value {word}")
    is_true = word in _TRUE
    return is_true if to_bool else int(is_true)


def get_int_from_env(env_keys: Any, default: int) -> int:
    """Return the first of some variables that holds a number of at least zero."""
    for variable_name in env_keys:
        variable_value = int(os.environ.get(variable_name, -1))
        if variable_value >= 0:
            return variable_value
    return default


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    return bool(str_to_bool(os.environ.get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    return os.environ.get(key, str(default))


@contextmanager
def _restore_variables(concerned: Callable[[str], bool]) -> Iterator[None]:
    """A block after which the variables concerned are as before."""
    saved_variables = {}
    for variable_name, variable_text in os.environ.items():
        if concerned(variable_name):
            saved_variables[variable_name] = variable_text
    try:
        yield
    finally:
        for variable_name in filter(concerned, list(os.environ)):
            del os.environ[variable_name]
        os.environ.update(saved_variables)


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """A block with these variables, in capitals; afterwards they are as before."""
    new_variables = {
        variable_name.upper(): str(variable_value)
        for variable_name, variable_value in kwargs.items()
    }
    with _restore_variables(new_variables.__contains__):
        os.environ.update(new_variables)
        yield


@contextmanager
def clear_environment() -> Iterator[None]:
    with _restore_variables(lambda name: True):
        os.environ.clear()
        yield


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Return a function, or the test methods of a class, after which variables named ACCELERATE_* are as before."""
    if not isinstance(func_or_cls, type):
        return _purge_after(func_or_cls)
    test_class: Any = func_or_cls
    _purge_tests(test_class, test_class)
    test_class.__init_subclass__ = classmethod(
        lambda cls, **options: _purge_tests(test_class, cls, **options)
    )
    return test_class


def _purge_tests(test_class: Any, cls: Any, **options: Any) -> None:
    if cls is not test_class:
        super(test_class, cls).__init_subclass__(**options)
    for test_name, test_function in list(vars(cls).items()):
        if callable(test_function) and test_name.startswith("test"):
            setattr(cls, test_name, _purge_after(test_function))


def _purge_after(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _restore_variables(lambda name: name.startswith("ACCELERATE_")):
            return function(*args, **kwargs)

    return run


def convert_dict_to_env_variables(current_env: dict[str, Any]) -> list[str]:
    unsafe, lines = set(";\n<> "), []
    for variable_name, variable_text in current_env.items():
        if variable_text and not unsafe & set(variable_name + str(variable_text)):
            lines.append(f"{variable_name}={variable_text}\n")
        else:
            _log.warning(
                f"WARNING: Skipping {variable_name}={variable_text} as it contains forbidden characters or missing values."
            )
    return lines


def are_libraries_initialized(*library_names: str) -> list[str]:
    return [
        library_name for library_name in library_names if library_name in sys.modules
    ]


def _nvidia_smi(question: str) -> list[str]:
    """Return the answer of the driver's own tool, a row for each device."""
    if platform.system() != "Windows":
        tool = "nvidia-smi"
    else:
        tool = "nvidia-smi.exe"
    answer = subprocess.check_output(
        [tool, f"--query-gpu={question}", "--format=csv,noheader"], text=True
    )
    return [row for row in answer.strip().split("\n") if row]


def get_gpu_info() -> tuple[list[str], int]:
    rows = _nvidia_smi("count,name")
    return [row.split(",")[1].strip() for row in rows], len(rows)


def get_driver_version() -> str:
    return _nvidia_smi("driver_version")[0]


def check_cuda_p2p_ib_support() -> bool:
    """Return whether devices can talk directly; consumer cards of the 4000 series with old drivers cannot."""
    # no device to ask speaks against it
    with suppress(OSError, subprocess.SubprocessError, ValueError, RuntimeError):
        device_names, count = get_gpu_info()
        if count > 1 and any("RTX 40" in device_name for device_name in device_names):
            return tuple(map(int, get_driver_version().split("."))) >= (
                550,
                40,
                7,
            )
    return True


@lru_cache
def check_cuda_fp8_capability() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


get_free_port = free_port
_PLACE = (("rank", 0), ("world_size", 1), ("local_rank", 0), ("local_world_size", 1))
CPUInformation: Any = make_dataclass(
    "CPUInformation",
    [(name, int, field(default=value)) for name, value in _PLACE],
    namespace={
        "__module__": __name__,
        "__doc__": "The place of a process among those of its job.",
    },
)


def get_cpu_distributed_information() -> Any:
    """Return the place of this process among those of its job, from the variables of any launcher."""
    topology = Topology.from_env(os.environ)
    return CPUInformation(
        topology.rank,
        topology.world_size,
        topology.local_rank,
        topology.local_world_size,
    )


@lru_cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores near its device, unless that was done before."""
    override_numa_affinity(local_process_index=local_process_index, verbose=verbose)


def override_numa_affinity(
    local_process_index: int, verbose: bool | None = None
) -> None:
    if torch.cuda.is_available():
        set_affinity(pci_address(torch.device("cuda", local_process_index)))


def is_port_in_use(port: int | None = None) -> bool:
    return is_reachable("localhost", 29500 if port is None else port)


def count_devices() -> int:
    return max(torch.cuda.device_count(), torch.accelerator.device_count())


def get_current_device_type() -> tuple[str, str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = "cuda" if accelerator is None else accelerator.type
    return (
        device_type,
        "MULTI_GPU" if device_type == "cuda" else f"MULTI_{device_type.upper()}",
    )
