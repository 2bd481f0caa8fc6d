"""Loggers that speak on the main process."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from functools import cache
from typing import Any

from accelerate._impl.environment.variables import environment
from accelerate._impl.surface.messages import message
from accelerate._impl.views.state import PartialState
from hasten.runtime.logs import RankLogger


class MultiProcessAdapter(RankLogger):
    """A logger that speaks on the main process only, unless a call says otherwise."""

    def __init__(self, logger: Any, extra: Any = None) -> None:
        super().__init__(
            logger if isinstance(logger, logging.Logger) else logger.logger
        )
        self.logger = logger
        self.extra = extra

    @staticmethod
    def _should_log(main_process_only: bool) -> bool:
        return not main_process_only or PartialState().is_main_process

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if not PartialState._shared_state:  # quirk: LOGGER_NEEDS_STATE
            raise RuntimeError(message("log_before_state"))
        main_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        process_state = PartialState()
        turns = in_order and not main_only
        named, passed = self.process(msg, kwargs)
        for turn in (
            range(process_state.num_processes)
            if turns
            else (process_state.process_index,)
        ):
            if (
                turn == process_state.process_index
                and self.isEnabledFor(level)
                and self._should_log(main_only)
            ):
                self.logger.log(level, named, *args, **passed)
            if turns:
                process_state.wait_for_everyone()

    warning_once = cache(RankLogger.warning)  # whose cache_clear() tests call

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[str, MutableMapping[str, Any]]:
        """Return the message with the rank before it, and the keywords with what the logger adds."""
        extra = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        # quirk: LOG_LINES_NAME_THE_RANK
        named = f"[RANK {PartialState().process_index}] {msg}"
        return named, {
            **kwargs,
            "extra": extra,
            "stacklevel": kwargs.get("stacklevel", 2),
        }


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    level = log_level or environment().get("ACCELERATE_LOG_LEVEL")
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})
