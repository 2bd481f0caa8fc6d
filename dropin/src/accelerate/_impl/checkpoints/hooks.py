"""Hooks of save_state and load_state: what they raise reaches the script as it was raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from hasten.errors import CheckpointError

# Any in this file: hooks of either kind, and their arguments.


class StateHooks:
    """Remembers what a hook raised, which hasten reports to every rank as a CheckpointError."""

    def __init__(self) -> None:
        self._raised: Exception | None = None

    def watched(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The hook, its failures remembered."""

        @wraps(hook)
        def run(*args: Any) -> Any:
            try:
                return hook(*args)
            except Exception as error:  # of any type: remembered, and raised as it is
                self._raised = error
                raise

        return run

    @contextmanager
    def errors_as_raised(self) -> Iterator[None]:
        """A block that raises a hook's own error on its rank; the others get the CheckpointError that names it."""
        self._raised = None
        try:
            yield
        except CheckpointError as error:
            if self._raised is not None:
                raise self._raised from error
            raise
        finally:
            self._raised = None
