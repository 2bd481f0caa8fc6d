"""Registry of trackers: the built-in ones, those of extensions, and the values of `log_with`."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Final, Literal

from hasten.errors import HastenWarning, MissingPackageError, TrackerError
from hasten.extension import offers
from hasten.optional import available, check_installed, need
from hasten.tracking.base import Tracker

Missing = Literal["error", "warn"]
LogWith = str | Tracker | Enum | Iterable["str | Tracker | Enum"] | None


@dataclass(frozen=True, slots=True)
class Builtin:
    """Built-in tracker: the path of its class, and the required module."""

    name: str
    where: str
    needs: str | None
    spec: str = ""


_HERE = "hasten.tracking.backends"
BUILTINS: Final = (
    Builtin("jsonl", f"{_HERE}.jsonl:JsonlTracker", None),
    Builtin("tensorboard", f"{_HERE}.tensorboard:TensorboardTracker", "tensorboard"),
    Builtin("wandb", f"{_HERE}.wandb:WandbTracker", "wandb"),
    Builtin("comet_ml", f"{_HERE}.comet_ml:CometTracker", "comet_ml"),
    Builtin("mlflow", f"{_HERE}.mlflow:MlflowTracker", "mlflow"),
    Builtin("aim", f"{_HERE}.aim:AimTracker", "aim"),
    Builtin("clearml", f"{_HERE}.clearml:ClearmlTracker", "clearml"),
    Builtin("dvclive", f"{_HERE}.dvclive:DvcliveTracker", "dvclive"),
    Builtin("swanlab", f"{_HERE}.swanlab:SwanlabTracker", "swanlab", ">=0.7"),
    Builtin("trackio", f"{_HERE}.trackio:TrackioTracker", "trackio"),
)


def installed() -> list[str]:
    """Return the names of all usable trackers: built-in and of extensions."""
    return [row.name for row in BUILTINS if row.needs is None or available(row.needs)] + sorted(offers("trackers"))


def build(log_with: LogWith, *, missing: Missing = "error", is_main: bool = True) -> list[Tracker]:
    """Create the trackers of `log_with`: a name, "all" (those whose packages are installed), an instance, or a list of these.

    The packages of trackers that are active on this process (`is_main`, or `every_rank`) are imported here. With `missing="warn"` a
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
    asked = [log_with] if isinstance(log_with, str | Tracker | Enum) else list(log_with)
    found: list[Tracker] = []
    for item in asked:
        if isinstance(item, Tracker):
            ours = type(item).__module__.startswith(_HERE)  # packages of other trackers are unknown
            found += [item] if not ours or _usable(item.name, missing, is_main or item.every_rank) else []
        else:
            name = str(item.value if isinstance(item, Enum) else item).lower()
            names, lenient = (installed(), "warn") if name == "all" else ([name], missing)
            found += [_create(one) for one in names if _usable(one, lenient, is_main)]
    _check_names(found)
    return found


def _usable(name: str, missing: str, here: bool) -> bool:
    """Return whether the package of a tracker is installed and, if the tracker is active on this process, can be imported.

    Raises: MissingPackageError otherwise, unless it may be omitted: a missing log would only be noticed after the run.
    """
    row = next((row for row in BUILTINS if row.name == name and row.needs is not None), None)
    if row is None or row.needs is None:
        return True
    why, purpose = f"log_with={name!r}", "its log"
    try:
        need(row.needs, row.spec, purpose) if here else check_installed(row.needs, row.spec, purpose)
    except MissingPackageError as error:
        if missing != "warn":
            raise MissingPackageError(f"{why}: {error}, or set missing_tracker: warn to train without it.") from error
        warnings.warn(f"{why}: {error}. This run is not logged there.", HastenWarning, stacklevel=2)
        return False
    return True


def _create(name: str) -> Tracker:
    for row in BUILTINS:
        if row.name == name:
            module, _, attribute = row.where.partition(":")
            builtin: Tracker = getattr(import_module(module), attribute)()  # only the requested backends
            return builtin
    offered = offers("trackers")
    if name not in offered:
        known = [*(row.name for row in BUILTINS), *offered]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Pass custom trackers as instances."
        raise TrackerError(f"there is no tracker {name!r}; the trackers are {', '.join(known)} and 'all'. {hint}")
    tracker = offered[name].load()()
    if not isinstance(tracker, Tracker):
        raise TrackerError(
            f"the extension {offered[name].extension!r} made a {type(tracker).__name__} as the tracker {name!r}, which cannot be "
            "started. Let its class derive from hasten.extending.Tracker."
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
