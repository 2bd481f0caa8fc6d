"""Numbers of one rank at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReading:
    """Numbers of one rank at one moment."""

    numbers: Mapping[str, float | None]
    """Values of the metrics in `catalogue.HELP`; None is a number that is not known."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Labels of the info metric: version, strategy, script."""
    memory_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes by kind: host, device."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time of the process by cause."""
