"""The Tracker base class, and the plain values that trackers receive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hasten.config.masking import masked_value
from hasten.errors import TrackerError

Scalar = bool | int | float | str
Pixels = NDArray[np.uint8]  # height x width x channels, with 1, 3 or 4 channels
Options = Mapping[str, Any]  # Any: keyword arguments of a foreign package


def to_gray(image: Pixels) -> Pixels:
    """Return an image of one channel as height x width, others unchanged."""
    return image.squeeze(2) if image.shape[2] == 1 else image


def to_rgb(image: Pixels) -> Pixels:
    """Return an image of one channel with three equal ones, others unchanged."""
    return image.repeat(3, 2) if image.shape[2] == 1 else image


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Run of a checkpoint: the tracker's id, and the last step logged before the checkpoint."""

    run_id: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run, as passed to a tracker at its start."""

    project: str
    run_id: str  # created by hasten, the same after a resume
    directory: Path  # folder for trackers that write files
    # Any: JSON values, possibly nested; as passed by the user
    config: Mapping[str, Any] = field(default_factory=dict)
    # this tracker's entry of `init_kwargs`
    options: Options = field(default_factory=dict)
    resume: Resume | None = None

    @property
    def shown_config(self) -> dict[str, Any]:
        """The config with credentials masked, for files and pages."""
        return {name: masked_value(name, value) for name, value in self.config.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Values of one call of `log`: plain numbers and strings, never tensors."""

    values: Mapping[str, Scalar]
    step: int
    time_s: float  # seconds since 1970, taken when `log` was called
    options: Options = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, float]:
        """The values that are numbers."""
        numbers = {}
        for value_name, logged_value in self.values.items():
            if not isinstance(logged_value, str):
                numbers[value_name] = float(logged_value)
        return numbers

    @property
    def texts(self) -> dict[str, str]:
        """The values that are strings."""
        texts = {}
        for value_name, logged_value in self.values.items():
            if isinstance(logged_value, str):
                texts[value_name] = logged_value
        return texts


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEntry:
    """Images of one call of `log_images`: one or more per name."""

    images: Mapping[str, Sequence[Pixels]]
    step: int
    time_s: float
    options: Options = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEntry:
    """Table of one call of `log_table`, with plain values."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Scalar | None]]
    step: int
    time_s: float
    options: Options = field(default_factory=dict)


class Tracker(ABC):
    """Base class of trackers; a subclass needs a `name` and `log`, the rest is optional.

    Ranks: main only.
    `start` and `finish` run on the main thread; `log*`, `rewind` and `flush` on one writer thread, in order.
    An exception of a method becomes one warning: a tracker cannot stop training.
    """

    name: str = ""
    package: str = ""
    """Importable name of the package that the tracker needs; empty for none."""
    package_versions: str = ""
    """Versions of the package that the tracker works with, such as ">=0.7"."""

    @property
    def native(self) -> Any:  # Any: the object of a foreign package
        """The object that `get_tracker(name, unwrap=True)` returns: the run or writer of its package."""
        return self

    def start(self, run: Run) -> str:
        """Open the run, or reopen `run.resume`; return the id for a later resume."""
        return run.resume.run_id if run.resume else run.run_id

    @abstractmethod
    def log(self, entry: Entry) -> None:
        """Record the values of one step."""

    def log_images(self, entry: ImageEntry) -> None:
        """Record images."""
        raise TrackerError(
            f"the tracker {self.name!r} does not support images; these were dropped."
        )

    def log_table(self, entry: TableEntry) -> None:
        """Record a table."""
        raise TrackerError(
            f"the tracker {self.name!r} does not support tables; this one was dropped."
        )

    def rewind(self, step: int) -> None:  # noqa: B027  an optional hook
        """Discard values logged after `step`, since training was rolled back to a checkpoint of this run."""

    def flush(self) -> None:  # noqa: B027  an optional hook
        """Make logged values visible to readers."""

    def finish(self, failed: bool) -> None:  # noqa: B027  an optional hook
        """Close the run; `failed` is true if training ended with an exception."""
