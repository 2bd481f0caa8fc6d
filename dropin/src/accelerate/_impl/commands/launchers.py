"""Starting training from a notebook or a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from accelerate._impl.ambient import AMBIENT
from accelerate._impl.environment.variables import environment, patch_environment
from accelerate._impl.views.state import PartialState
from hasten.launch import notebook

# Any in this file: the user's function and its arguments.


def test_launch() -> None:
    """Say where this process is."""
    _ = PartialState()


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
    if str(mixed_precision).lower() not in ("no", "fp16", "bf16", "fp8"):
        raise ValueError(
            f"Unknown mixed_precision mode: {mixed_precision}. Choose between ['no', 'fp8', 'fp16', 'bf16']."
        )
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    wanted = max(devices, 1) if num_processes is None else num_processes
    if wanted <= 1 and num_nodes == 1:
        with patch_environment(ACCELERATE_MIXED_PRECISION=str(mixed_precision).lower()):
            return function(*args)
    if AMBIENT.whole:
        raise ValueError(
            "To launch a multi-process training from your notebook, the `Accelerator` should only be initialized "
            "inside your training function. Restart your notebook and make sure no cells initializes an `Accelerator`."
        )
    return notebook.notebook_launcher(
        function,
        args,
        num_processes=wanted,
        mixed_precision=str(mixed_precision).lower(),
        use_port=None if num_nodes == 1 else use_port,
        master_addr=None if num_nodes == 1 else master_addr,
        node_rank=node_rank,
        num_nodes=num_nodes,
        rdzv_backend=None if rdzv_backend == "static" else rdzv_backend,
        rdzv_endpoint=rdzv_endpoint or None,
        rdzv_conf=rdzv_conf,
        rdzv_id=None if rdzv_id == "none" else rdzv_id,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        cpu=devices == 0 or environment().get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"),
    )


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run `function(*args)` in CPU processes: for tests without devices."""
    notebook.debug_launcher(function, args, num_processes)
