"""Registry of trackers: hasten's own, those of extensions, and the values of `log_with`."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Literal

from hasten.errors import HastenWarning, MissingPackageError, TrackerError
from hasten.extension import offers
from hasten.optional import available, check_installed, need
from hasten.tracking.base import Tracker
from hasten.tracking.jsonl import JsonlTracker

Missing = Literal["error", "warn"]
LogWith = str | Tracker | Enum | Iterable["str | Tracker | Enum"] | None


def tracker_names() -> list[str]:
    """Return the names of all trackers: hasten's own, and those of extensions."""
    return [JsonlTracker.name, *offers("trackers")]


def installed_trackers() -> list[str]:
    """Return the names of the trackers whose packages are installed."""
    tracker_classes = {name: tracker_class(name) for name in tracker_names()}
    installed_names = []
    for name, tracker in tracker_classes.items():
        if not tracker.package or available(tracker.package):
            installed_names.append(name)
    return installed_names


def build_trackers(
    log_with: LogWith, *, missing: Missing = "error", is_main: bool = True
) -> list[Tracker]:
    """Create the trackers of `log_with`: a name, "all" (those whose packages are installed), an instance, or a list of these.

    The packages are imported on the main process. With `missing="warn"` a
    named tracker whose package is not installed or cannot be imported is omitted with a warning, as with "all".
    Raises: TrackerError for an unknown or repeated name; MissingPackageError for a named one whose package is missing or broken.
    """
    if log_with is None:
        return []
    if not isinstance(log_with, str | Tracker | Enum | Iterable):
        raise TrackerError(
            f"log_with={log_with!r} is of type {type(log_with).__name__}, so it is unclear where to log; give a name such as 'jsonl', a "
            "hasten.extending.Tracker, or a list of them."
        )
    if isinstance(log_with, str | Tracker | Enum):
        requested_trackers = [log_with]
    else:
        requested_trackers = list(log_with)
    trackers: list[Tracker] = []
    for requested_tracker in requested_trackers:
        if isinstance(requested_tracker, Tracker):
            if _is_usable(requested_tracker, missing, is_main):
                trackers.append(requested_tracker)
            continue
        if isinstance(requested_tracker, Enum):
            requested_tracker = requested_tracker.value
        name = str(requested_tracker).lower()
        if name == "all":
            names = installed_trackers()
            missing_policy = "warn"
        else:
            names = [name]
            missing_policy = missing
        tracker_classes = list(map(tracker_class, names))
        for tracker in tracker_classes:
            if _is_usable(tracker, missing_policy, is_main):
                trackers.append(tracker())
    _check_names(trackers)
    return trackers


def _is_usable(tracker: Tracker | type[Tracker], missing: str, is_active: bool) -> bool:
    """Return whether the package of a tracker is installed and, if the tracker is active on this process, can be imported.

    Raises: MissingPackageError otherwise, unless it may be omitted: a missing log would only be noticed after the run.
    """
    if not tracker.package:
        return True
    check = need if is_active else check_installed
    try:
        check(tracker.package, tracker.package_versions, "its log")
    except MissingPackageError as error:
        reason = f"log_with={tracker.name!r}"
        if missing != "warn":
            raise MissingPackageError(
                f"{reason}: {error}, or set missing_tracker: warn to train without it."
            ) from error
        warnings.warn(
            f"{reason}: {error}. This run is not logged there.",
            HastenWarning,
            stacklevel=2,
        )
        return False
    return True


def tracker_class(name: str) -> type[Tracker]:
    """Return the class of a tracker. Raises: TrackerError for a name that nothing provides, or another object."""
    if name == JsonlTracker.name:
        return JsonlTracker
    offered_trackers = offers("trackers")
    if name not in offered_trackers:
        known_names = tracker_names()
        similar_names = difflib.get_close_matches(name, known_names, n=1)
        if similar_names:
            hint = f"Did you mean {similar_names[0]!r}?"
        else:
            hint = "Pass custom trackers as instances."
        raise TrackerError(
            f"there is no tracker {name!r}; the trackers are {', '.join(known_names)} and 'all'. {hint}"
        )
    tracker = offered_trackers[name].load()
    if not (isinstance(tracker, type) and issubclass(tracker, Tracker)):
        raise TrackerError(
            f"the extension {offered_trackers[name].extension!r} offers {tracker!r} as the tracker {name!r}, which cannot be started. Let its class "
            "derive from hasten.extending.Tracker."
        )
    return tracker


def _check_names(trackers: Sequence[Tracker]) -> None:
    names = [tracker.name for tracker in trackers]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated or "" in names:
        raise TrackerError(
            f"log_with gave trackers named {names}; get_tracker and init_kwargs find a tracker by its name. Give each tracker a "
            "different name."
        )
