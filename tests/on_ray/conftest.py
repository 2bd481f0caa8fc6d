"""Tests on a real Ray and a real Optuna: run by `make test-ray`, skipped where the packages are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.optional import available

RAY_TESTS = Path(__file__).parent
HAS_RAY = available("ray") and available("optuna")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder, with the command that runs them."""
    for item in items:
        if not HAS_RAY and RAY_TESTS in item.path.parents:
            item.add_marker(
                pytest.mark.skip(
                    reason="ray and optuna are not installed; run: make test-ray"
                )
            )
