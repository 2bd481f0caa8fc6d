"""Report of a run that continues when replicas are lost, as one replica has seen it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class SurvivalReport:
    """Lost, returned and healed replicas of a run, as seen by one of them."""

    lost: list[tuple[int, str]] = field(default_factory=list)
    """(update, replica): replicas whose gradients are not in that update, though they had samples of it."""
    joined: list[tuple[int, str]] = field(default_factory=list)
    """(update, replica): replicas that have received the run's state after that update."""
    healed: list[int] = field(default_factory=list)
    """Updates after which this replica has received the run's state from another."""
    num_retries: int = 0
    """Number of exchanges that were repeated because a replica was lost in them."""
    longest_pause_s: float = 0.0
    """Longest time that an update waited for the exchange to succeed, in updates with a retry or a lost replica."""
    num_returned: int = 0
    """Number of samples that were given out again."""
    num_present: int = 0
    """Number of replicas of the latest update, those included that have received the run's state after it."""
    waiting_since: float | None = None
    """Time by `time.monotonic()` since which this replica waits for the members of an update; None while it does not wait."""

    @property
    def waiting_s(self) -> float:
        """Seconds for which this replica has been waiting for others, as below the minimum; 0 while it does not wait."""
        since = self.waiting_since
        return 0.0 if since is None else time.monotonic() - since

    def list_status(self, replica: str) -> dict[str, float | str]:
        """Return what `hasten top` shows of this replica and of the others."""
        return {
            "replica": replica,
            "replicas": self.num_present,
            "replicas_lost": len(self.lost),
            "replicas_joined": len(self.joined),
            "replica_healed": len(self.healed),
            "samples_returned": self.num_returned,
            "replicas_waiting_s": self.waiting_s,
        }
