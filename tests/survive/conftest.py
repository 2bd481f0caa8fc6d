"""Tests of replicas that may be lost on a real torchft: run by `make test-survive`, skipped where the package is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.optional import available

SURVIVE_TESTS = Path(__file__).parent
HAS_TORCHFT = available("torchft")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder, with the command that runs them."""
    for item in items:
        if not HAS_TORCHFT and SURVIVE_TESTS in item.path.parents:
            item.add_marker(
                pytest.mark.skip(
                    reason="torchft is not installed; run: make test-survive"
                )
            )
