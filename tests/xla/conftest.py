"""Tests of strategy='xla' on a real torch_xla: run by `make test-xla`, skipped where the package is missing."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import pytest

from hasten.optional import available

XLA_TESTS = Path(__file__).parent
HAS_TORCH_XLA = available("torch_xla")
if HAS_TORCH_XLA:  # switched on for good before the first test, as these variables stay
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    # Every program here runs a few times: compiling takes a third of the time without LLVM's optimisations.
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    )
    import_module("hasten").Accelerator(strategy="xla")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder, with the command that runs them."""
    for item in items:
        if not HAS_TORCH_XLA and XLA_TESTS in item.path.parents:
            item.add_marker(
                pytest.mark.skip(
                    reason="torch_xla is not installed; run: make test-xla"
                )
            )
