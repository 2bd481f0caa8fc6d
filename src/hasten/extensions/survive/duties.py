"""Duties of one replica's loop: saving, printing and logging for all replicas, and leaving after a signal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from hasten.extensions.survive.folder import STOPPING_FILE

FIRST_LEADER: Final = "0"
"""Name of the replica that leads before the members are known."""
_POLL_INTERVAL_S: Final = 0.02
_RUN_SIGNAL_TIMEOUT_S: Final = 1.5
"""Seconds for which a replica that has received a signal waits for that file. Schedulers such as SLURM signal all processes at once, and the
launchers need a moment to tell each other that the whole run was told to stop."""


class Duties:
    """The leader of the run as one replica knows it, and the signals to stop that this replica has received.

    The leader is the first of the replicas that have made the latest update. A replica that was healed since is not among them: its loop
    has to catch up with the run first, and what it saves or logs meanwhile belongs to epochs that the run has completed.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._stop_file = folder / STOPPING_FILE
        self._leader: str | None = FIRST_LEADER
        self._run_ends = self._is_signal_for_this_replica = False
        self.behind = False
        """True while the loop of this replica, which was healed, may still be in an epoch that the run has completed."""
        self.received: Callable[[], int | None] = lambda: None
        """Returns the signal that this process has received, None for none."""

    @property
    def leads(self) -> bool:
        """True on the replica that prints, saves and logs."""
        return self._leader == self._name

    def record_update(
        self, contributors: Iterable[str], ends_run: bool = False
    ) -> None:
        """Record an update of these replicas; with `stops`, one of them has asked to end the run after it."""
        self._leader = min(contributors)
        self.behind = False
        self._run_ends = self._run_ends or ends_run

    def record_epoch_end(
        self, members: Iterable[str], healed_replicas: Iterable[str]
    ) -> None:
        """Record the members at the end of an epoch, and those that were healed there: they do not lead before an update."""
        member_names = set(members)
        healed_names = set(healed_replicas)
        self.behind = False
        if self._leader is not None or member_names == {self._name}:
            self._leader = min(member_names - healed_names or member_names)

    def record_healing(self) -> None:
        """Record that this replica has received the run's state."""
        self._leader = None
        self.behind = True

    # -- signals ---------------------------------------------------------------------------------------------------
    @property
    def asks_to_stop(self) -> bool:
        """True if the whole run was told to stop; the replicas agree on it in their next update."""
        return self.received() is not None and self._stop_file.exists()

    @property
    def leaves(self) -> bool:
        """True if this replica has to leave the run now: the replicas have agreed to stop, or the signal was for this one alone."""
        if self._run_ends:
            return True
        return self.received() is not None and (self.behind or self._was_meant_alone())

    def _was_meant_alone(self) -> bool:
        """Return True if the launcher does not say, within a moment after the signal, that the whole run was told to stop."""
        if self._is_signal_for_this_replica:
            return True
        deadline_s = time.monotonic() + _RUN_SIGNAL_TIMEOUT_S
        while not self._stop_file.exists() and time.monotonic() < deadline_s:
            time.sleep(_POLL_INTERVAL_S)
        self._is_signal_for_this_replica = not self._stop_file.exists()
        return self._is_signal_for_this_replica
