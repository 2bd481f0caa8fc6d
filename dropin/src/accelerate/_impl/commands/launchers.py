"""Starting training from a notebook or a test."""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)
from torch.multiprocessing.spawn import start_processes

from accelerate._impl.ambient import AMBIENT
from accelerate._impl.environment.packages import is_mps_available
from accelerate._impl.environment.variables import environment, patch_environment
from accelerate._impl.surface.messages import message
from accelerate._impl.views.state import AcceleratorState, PartialState
from hasten.errors import LaunchError
from hasten.launch import notebook

# Any in this file: the user's function and its arguments.
_NOT_OF_THE_LAUNCH = ("function", "args", "log_line_prefix_template")


def test_launch() -> None:
    _ = PartialState()


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> None:
    # outlives the processes
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {
        "master_addr": store.host,
        "master_port": store.port,
        "world_size": num_processes,
        "fork_launched": 1,
    }
    served = {"torchelastic_use_agent_store": True, "torchelastic_restart_count": 0}
    with patch_environment(
        accelerate_mixed_precision="no", accelerate_use_cpu="yes", **meeting, **served
    ):
        start: Any = start_processes  # not typed in torch
        start(
            partial(_fork_workers, function), args, num_processes, start_method="fork"
        )


def _fork_workers(function: Callable[..., Any], rank: int, *args: Any) -> None:
    AcceleratorState._reset_state(True)
    # the threads of the process that was forked are not here: computing with them never ends
    torch.set_num_threads(1)
    with patch_environment(
        rank=rank, local_rank=rank, local_world_size=environment()["WORLD_SIZE"]
    ):
        function(*args)


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> Any:
    """Run `function(*args)` in new processes, or here when one process is enough; what the first rank returns."""
    launch_arguments = {
        name: value
        for name, value in locals().items()
        if name not in _NOT_OF_THE_LAUNCH
    }
    launch_arguments["mixed_precision"] = precision = str(mixed_precision).lower()
    _check_arguments(launch_arguments)
    if torch.accelerator.is_available():
        devices = torch.accelerator.device_count()
    else:
        devices = 0
    launch_arguments["num_processes"] = process_count = (
        max(devices, 1) if num_processes is None else num_processes
    )
    if process_count <= 1 and num_nodes == 1:
        _announce_launch(process_count, devices)
        with patch_environment(
            **({"ACCELERATE_MIXED_PRECISION": precision} if precision != "no" else {})
        ):
            return function(*args)
    return _in_processes(function, args, launch_arguments, devices)


def _check_arguments(launch_arguments: dict[str, Any]) -> None:
    if launch_arguments["mixed_precision"] not in ("no", "fp16", "bf16", "fp8"):
        raise ValueError(
            message("unknown_precision", launch_arguments["mixed_precision"])
        )
    if launch_arguments["node_rank"] >= launch_arguments["num_nodes"]:
        raise ValueError("The node_rank must be less than the number of nodes.")
    shell = sys.modules.get("IPython")
    if launch_arguments["num_processes"] is None and (
        shell is None or "google.colab" not in str(shell.get_ipython())
    ):
        raise ValueError(message("num_processes_missing"))


def _in_processes(
    function: Callable[..., Any],
    args: Sequence[Any],
    launch_arguments: dict[str, Any],
    devices: int,
) -> Any:
    """Start processes; what stands for nothing in the established arguments is left to hasten."""
    if AMBIENT.whole:
        raise ValueError(message("accelerator_before_launch"))
    _announce_launch(launch_arguments["num_processes"], devices)
    local_names = (
        ("use_port", "master_addr") if launch_arguments["num_nodes"] == 1 else ()
    )
    neutral_values = {"rdzv_backend": "static", "rdzv_endpoint": "", "rdzv_id": "none"}
    options: dict[str, Any] = {
        argument_name: None
        if argument_name in local_names
        or neutral_values.get(argument_name) == argument_value
        else argument_value
        for argument_name, argument_value in launch_arguments.items()
    }
    cpu = devices == 0 or environment().get("ACCELERATE_USE_CPU", "").lower() in (
        "1",
        "true",
        "yes",
    )
    try:
        worker = update_wrapper(
            partial(_run_worker, function, _random_states()), function
        )
        return notebook.notebook_launcher(worker, args, cpu=cpu, **options)
    except LaunchError as error:
        raise _failed_child(error, function.__name__) from error


def _random_states() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _run_worker(
    function: Callable[..., Any], states: tuple[Any, Any, torch.Tensor], *args: Any
) -> Any:
    """Call the notebook's function with the notebook's random states, in which a forked process would begin."""
    python_state, numpy_state, torch_state = states
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
    AMBIENT.compares_data = True
    return function(*args)


def _announce_launch(processes: int, devices: int) -> None:
    if devices:
        device_type = (
            str(torch.accelerator.current_accelerator()).partition(":")[0].upper()
        )
    else:
        device_type = "CPU"
    single_devices = {
        "MPS": is_mps_available,
        "one GPU": torch.cuda.is_available,
        "one XPU": torch.xpu.is_available,
    }
    if processes > 1:
        where = f"{processes} {device_type}s"
    else:
        where = next(
            (
                device_name
                for device_name, is_available in single_devices.items()
                if is_available()
            ),
            "CPU",
        )
    print(f"Launching training on {where}.")  # noqa: T201  as the original says it


def _failed_child(error: LaunchError, name: str) -> ChildFailedError:
    """Return the error as torch's launcher raises it, with the child's message."""
    rank_match = re.search(r"rank (\d+).*? \(pid (\d+)\)", str(error))
    rank, pid = (int(rank_match[1]), int(rank_match[2])) if rank_match else (0, 0)
    with NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(
            {
                "message": {
                    "message": str(error),
                    "extraInfo": {"timestamp": str(int(time.time()))},
                }
            },
            file,
        )
        file.flush()
        return ChildFailedError(name, {rank: ProcessFailure(rank, pid, 1, file.name)})
