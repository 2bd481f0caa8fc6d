"""Helpers for testing scripts, loaded on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:  # Any: whatever the name stands for
    if name.startswith("_"):
        raise AttributeError(name)
    for module in ("accelerate.test_utils.testing", "accelerate.test_utils.training"):
        if hasattr(found := import_module(module), name):
            return getattr(found, name)
    raise AttributeError(f"module 'accelerate.test_utils' has no attribute {name!r}")


def __dir__() -> list[str]:
    testing = import_module("accelerate.test_utils.testing")
    names = [n for n in vars(testing) if n.startswith(("require_", "get_", "run_")) or n in ("slow", "skip")]
    return sorted({*names, "RegressionDataset", "RegressionModel", "execute_subprocess_async", "are_the_same_tensors"})
