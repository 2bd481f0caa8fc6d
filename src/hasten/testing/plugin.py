"""pytest plugin with one pool of workers for the whole run, started by the first test with @ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from hasten.testing.pool import Pool

POOL: Final = pytest.StashKey[Pool]()
"""Key of the pool in the stash of pytest's config."""


@pytest.fixture(scope="session")
def rank_pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Yield the pool of warm workers shared by all tests marked with @ranks."""
    with Pool(2) as pool:
        request.config.stash[POOL] = pool
        yield pool
        del request.config.stash[POOL]
