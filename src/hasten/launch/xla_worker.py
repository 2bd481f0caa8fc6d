"""Starts the user's program once per TPU chip through torch_xla's own launcher. Run as python -m hasten.launch.xla_worker."""

from __future__ import annotations

import sys

from hasten.launch import worker
from hasten.optional import need


def run_program(index: int, argv: list[str]) -> None:
    """Run the program in one of torch_xla's processes."""
    sys.argv[:] = argv
    worker.main()


def main() -> None:
    """Start one process per chip."""
    need("torch_xla", ">=2.5", "training on TPUs").launch(run_program, args=(list(sys.argv),))


if __name__ == "__main__":
    from hasten.launch import xla_worker

    xla_worker.main()
