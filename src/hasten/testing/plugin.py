"""The pytest plugin: one pool of workers for the whole run, started when the first test with @ranks needs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from hasten.testing.pool import Pool

POOL: Final = pytest.StashKey[Pool]()
"""Where the run's configuration keeps the pool while there is one."""


@pytest.fixture(scope="session")
def rank_pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Yield the warm workers that every test marked with @ranks shares."""
    with Pool(2) as pool:
        request.config.stash[POOL] = pool
        yield pool
        del request.config.stash[POOL]
