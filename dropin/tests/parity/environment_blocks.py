"""Blocks with other variables, which are put back."""

import os

from accelerate.utils import (
    clear_environment,
    patch_environment,
    purge_accelerate_environment,
)


def run() -> object:
    os.environ["KEPT"] = "1"
    variables = []
    with patch_environment(kept="2", other=3):
        variables += [os.environ["KEPT"], os.environ["OTHER"]]
    variables += [os.environ["KEPT"], "OTHER" in os.environ]
    with clear_environment():
        variables.append("KEPT" in os.environ)
    variables.append(os.environ["KEPT"])

    @purge_accelerate_environment
    def inside():
        os.environ["ACCELERATE_SOMETHING"] = "1"

    inside()
    del os.environ["KEPT"]
    return [*variables, "ACCELERATE_SOMETHING" in os.environ]


PROCESSES = (1,)
