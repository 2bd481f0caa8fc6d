"""Blocks with other variables, which are put back."""

import os

from accelerate.utils import (
    clear_environment,
    patch_environment,
    purge_accelerate_environment,
)


def run() -> object:
    os.environ["KEPT"] = "1"
    found = []
    with patch_environment(kept="2", other=3):
        found += [os.environ["KEPT"], os.environ["OTHER"]]
    found += [os.environ["KEPT"], "OTHER" in os.environ]
    with clear_environment():
        found.append("KEPT" in os.environ)
    found.append(os.environ["KEPT"])

    @purge_accelerate_environment
    def inside():
        os.environ["ACCELERATE_SOMETHING"] = "1"

    inside()
    del os.environ["KEPT"]
    return [*found, "ACCELERATE_SOMETHING" in os.environ]


PROCESSES = (1,)
