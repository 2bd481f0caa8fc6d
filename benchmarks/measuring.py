"""What several benchmarks share: a look at computing dtypes, a script started on two ranks, results written as JSON and Markdown."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def record_dtypes() -> Iterator[set[torch.dtype]]:
    """The dtypes in which linear layers compute inside the block."""
    dtypes: set[torch.dtype] = set()

    def note_dtype(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(module, nn.Linear) and isinstance(output, Tensor):
            dtypes.add(output.dtype)

    handle = nn.modules.module.register_module_forward_hook(note_dtype)
    try:
        yield dtypes
    finally:
        handle.remove()


def on_two_ranks(script: str, *options: str) -> Any:  # Any: JSON
    """What rank 0 of `script --worker` printed last, decoded; both ranks run on this machine with one thread each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    world_variables = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    workers = [
        subprocess.Popen(
            [sys.executable, script, "--worker", *options],
            env={
                **os.environ,
                **world_variables,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        sys.exit("a rank failed")
    return json.loads(outputs[0].splitlines()[-1])
