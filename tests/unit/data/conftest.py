"""Things torch and Python keep for the life of a process once workers were used: started before the tests are watched."""

from __future__ import annotations

import os
from multiprocessing import resource_tracker

import pytest
import tqdm
from torch.utils.data import DataLoader


@pytest.fixture(autouse=True, scope="session")
def _workers_have_been_used() -> None:
    """Torch's SIGCHLD handler, the resource tracker of spawned processes, and what `datasets` sets outlive all loaders."""
    resource_tracker.ensure_running()
    tqdm.tqdm.monitor_interval = 0  # no thread that watches progress bars
    os.environ.setdefault("KMP_DUPLICATE_LIB_OK", "True")
    list(DataLoader(range(2), num_workers=1))  # type: ignore[arg-type] # a range is a dataset
