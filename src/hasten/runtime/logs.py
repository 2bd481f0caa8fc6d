"""Rank-aware loggers. Does not import torch."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from hasten.errors import CommError, TopologyError
from hasten.runtime import env
from hasten.runtime.topology import Topology

LIBRARY: Final = "hasten"


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """Logger that logs on the main process only, unless a call specifies otherwise.

    Every logging method accepts two more keywords. `main_process_only=False` logs on every rank, with the rank as prefix.
    `in_order=True` in addition logs one rank after the other; every rank must make such a call, whatever its level.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._has_level = logger.level != logging.NOTSET
        self._logged_warnings: set[tuple[str, str]] = set()

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the name is logging's
        """Return whether a record of this level would be logged on a process that logs."""
        # on first use, because loggers are created when modules are imported
        if not self._has_level:
            self._has_level = True
            if level_name := env.log_level(env.snapshot()):
                self.logger.setLevel(level_name)
        return self.logger.isEnabledFor(level)

    # Any: as in logging
    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log on the main process, or on the ranks given by the keywords.

        Raises: CommError if `in_order` is requested before there is a process group.
        """
        main_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        is_enabled = self.isEnabledFor(level)
        in_order = in_order and not main_only
        if not is_enabled and not in_order:
            return
        # the caller's line, not this one
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        rank, world_size = _rank_and_size()
        if not main_only and world_size > 1:
            msg = f"[RANK {rank}] {msg}"
        logging_ranks: Sequence[int] = (rank,)
        if in_order:
            logging_ranks = range(world_size)
        elif main_only:
            logging_ranks = (0,)
        for logging_rank in logging_ranks:
            if logging_rank == rank and is_enabled:
                self.logger.log(level, msg, *args, **kwargs)
            if in_order and world_size > 1:
                _wait_for_ranks(rank, world_size)

    # Any: as in logging
    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a warning the first time that this logger receives it."""
        message_key = (str(msg), repr(args))
        if message_key not in self._logged_warnings:
            self._logged_warnings.add(message_key)
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            self.warning(msg, *args, **kwargs)


def get_logger(name: str, log_level: str | int | None = None) -> RankLogger:
    """Return the logger `name`, which logs on the main process only unless a call specifies otherwise.

    Its level is `log_level`, else HASTEN_LOG_LEVEL, else inherited from logging; the root logger is never changed.
    Works at any time: the rank is that of the process group if there is one, else that in the launcher's variables.
    """
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper() if isinstance(log_level, str) else log_level)
    return RankLogger(logger)


def show_logs(level: str | int = "INFO") -> Callable[[], None]:
    """Show hasten's log from `level` up, on stderr if no handler is configured; return a function that undoes it."""
    logger = logging.getLogger(LIBRARY)
    saved_level = logger.level
    logger.setLevel(level)
    handler: logging.Handler | None = None
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(
            logging.Formatter(
                "%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"
            )
        )
        logger.addHandler(handler)

    def remove_handler() -> None:
        logger.setLevel(saved_level)
        if handler is not None:
            logger.removeHandler(handler)

    return remove_handler


def on_main(action: Callable[[], object]) -> None:
    """Call `action` on the main process only; works before there is a process group."""
    if _rank_and_size()[0] == 0:
        action()


def _rank_and_size() -> tuple[int, int]:
    """Return rank and world size: of the process group if there is one, else from the environment."""
    # not imported here: a log line must not take seconds
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:
        topology = Topology.from_env(env.snapshot())
    # reported when the process group is started; the log line must not be lost
    except TopologyError:
        return 0, 1
    return topology.rank, topology.world_size


def _wait_for_ranks(rank: int, world_size: int) -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        raise CommError(
            f"in_order=True was asked for on rank {rank} of {world_size} before there is a process group, so the ranks cannot "
            f"wait for each other; create the Accelerator first, or log without in_order."
        )
    dist.barrier()
