"""The newest lines of a process's log, whatever handlers it has: records are seen where they are made."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any, Final

_KEPT: Final = 20
_WIDTH: Final = 300


class RecentLog:
    """Stands before logging's factory of records between `start` and `stop`."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_KEPT)
        self._before = logging.getLogRecordFactory()

    def start(self) -> None:
        """Begin to keep lines."""
        self._before = logging.getLogRecordFactory()
        logging.setLogRecordFactory(self)

    def stop(self) -> None:
        """Take it out of the chain of factories, whatever was put before it; behind a foreign one it only stops keeping lines."""
        self.lines = deque(maxlen=0)
        factory = logging.getLogRecordFactory()
        if factory is self:
            logging.setLogRecordFactory(self._before)
        while isinstance(factory, RecentLog):
            if factory._before is self:
                factory._before = self._before
                return
            factory = factory._before

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:  # Any: what logging hands over
        record = self._before(*args, **kwargs)
        try:
            text = record.getMessage().splitlines()
        except (TypeError, ValueError, KeyError, IndexError):  # a wrong format: the handlers report it
            return record
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        self.lines.append(f"{stamp} {record.levelname} {record.name}: {text[0] if text else ''}"[:_WIDTH])
        return record
