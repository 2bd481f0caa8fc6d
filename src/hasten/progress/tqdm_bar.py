"""tqdm on one process per node, for scripts that already use it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hasten.optional import need
from hasten.runtime import env
from hasten.runtime.topology import Topology


def tqdm(
    iterable: Iterable[Any] | None = None,
    *args: Any,
    main_process_only: bool = True,
    topology: Topology | None = None,
    **kwargs: Any,
) -> Any:  # Any: tqdm is an optional, untyped package
    """Return `tqdm.auto.tqdm(iterable, ...)`, disabled except on each node's first process unless `main_process_only` is off.

    Raises: MissingPackageError without the package tqdm.
    """
    if main_process_only:
        process_topology = topology or Topology.from_env(env.snapshot())
        kwargs["disable"] = (
            kwargs.get("disable", False) or process_topology.local_rank != 0
        )
    return need("tqdm.auto", why="hasten.tqdm").tqdm(iterable, *args, **kwargs)
