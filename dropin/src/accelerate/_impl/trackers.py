"""Trackers with the established interface: hasten's backends underneath, users' own classes beside them."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from accelerate._impl.ambient import process
from accelerate._impl.enums import LoggerType
from accelerate._impl.environment.variables import str_to_bool
from accelerate._impl.surface.shown import shown
from accelerate._impl.views.logging import get_logger
from hasten.tracking import registry
from hasten.tracking.base import Entry, ImageEntry, Run, TableEntry
from hasten.tracking.values import as_pixels, flatten, plain_config

logger = get_logger("accelerate.tracking")
# Any in this file: values of every kind, and foreign packages' objects.


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """A tracker's method, run on the main process only when the tracker says so."""

    @wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, _Backend) or getattr(self, "main_process_only", False):  # one run, whatever the mark says
            return process().on_main_process(function)(self, *args, **kwargs)
        return function(self, *args, **kwargs)

    return run


class GeneralTracker:
    """Base of all trackers: needs `name`, `requires_logging_directory` and the property `tracker`."""

    main_process_only = True

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        missing = [name for name in ("name", "requires_logging_directory", "tracker") if name not in dir(self)]
        if missing:
            raise NotImplementedError(
                f"The implementation for this tracker class is missing the following required attributes. Please define them in the class definition: {', '.join(f'`{one}`' for one in missing)}"
            )

    def start(self) -> None:
        """Begin the run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the run's settings."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values."""

    def finish(self) -> None:
        """End the run."""


def _plain(value: Any) -> Any:
    """A tensor or array of one element as a number; everything else as it is."""
    alone = hasattr(value, "item") and getattr(value, "shape", ()) in ((), (1,))
    return value.item() if alone else value


def _is_scalar(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


class _Backend(GeneralTracker):
    """A tracker of hasten's under its established name."""

    name = ""
    requires_logging_directory = False
    named = False  # whether hasten chooses the run's id, name and folder instead of the package
    settings = ""  # the function that takes the settings, as a path below hasten's tracker
    _run: Any = None
    _over = False
    _step: Any = 0  # the step of values that are given without one; None if the package counts

    def __init__(self, run_name: str | None = None, logging_dir: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.logging_dir, self.init_kwargs = run_name or "run", logging_dir, kwargs

    @on_main_process
    def start(self) -> None:
        self._run, self._over = registry.build(self.name)[0], False
        place: dict[str, Any] = {"directory": Path(self.logging_dir or "runs"), "named": self.named}
        self._run.start(Run(project=self.run_name, run_id=self.run_name, options=self.init_kwargs, **place))

    tracker = run = writer = shown("_run.native", "The package's own run or writer.")

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        attrgetter(self.settings)(self._run)(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        at = self._step if step is None else int(step)
        self._step = at + 1
        plain = {key: _plain(value) for key, value in flatten(values)}
        kept = {key: value for key, value in plain.items() if _is_scalar(value)}
        self._run.log(Entry(values=kept, step=at, time_s=time.time(), options=kwargs))

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images."""
        images = {key: as_pixels(key, value) for key, value in values.items()}
        at = self._step if step is None else step
        self._run.log_images(ImageEntry(images=images, step=at, time_s=time.time(), options=kwargs))

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: Any = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a table."""
        if dataframe is not None:
            columns, data = list(dataframe.columns), dataframe.values.tolist()
        entry = {"name": table_name, "columns": columns, "rows": data, "step": self._step if step is None else step}
        self._run.log_table(TableEntry(**entry, time_s=time.time(), options=kwargs))

    @on_main_process
    def finish(self) -> None:
        if self._run is not None and not self._over:
            self._run.flush()
            self._run.finish(False)
            self._over = True


_ADDERS: Any = ((str, "add_text"), (dict, "add_scalars"), ((bool, int, float), "add_scalar"))


class TensorBoardTracker(_Backend):
    """TensorBoard."""

    name, requires_logging_directory, named = "tensorboard", True, True

    def __init__(self, run_name: str, logging_dir: Any, **kwargs: Any) -> None:
        super().__init__(run_name, logging_dir, **{"log_dir": str(Path(logging_dir) / run_name), **kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the run's settings for the HPARAMS tab and as hparams.yml, in a folder named by the time."""
        config = plain_config(values)
        shown = {name: one if one is None or _is_scalar(one) else json.dumps(one) for name, one in config.items()}
        moment = str(time.time())
        self.tracker.add_hparams(shown, metric_dict={}, run_name=moment)
        self.tracker.flush()
        folder = Path(self.tracker.get_logdir()) / moment
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hparams.yml").write_text(yaml.safe_dump(config))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Plot numbers and dicts of numbers, and show strings; nothing is recorded of values that are neither."""
        for name, given in values.items():
            value = _plain(given)
            add = next((method for kind, method in _ADDERS if isinstance(value, kind)), None)
            if add is None:
                logger.debug(f"{name} is a {type(value).__name__}, which TensorBoard cannot plot: left out")
            else:
                getattr(self.tracker, add)(name, value, global_step=step, **kwargs)
        self.tracker.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record batches of images; keywords such as `dataformats` go to the writer's add_images."""
        for name, images in values.items():
            self.tracker.add_images(name, images, global_step=step, **kwargs)


class _Service(_Backend):
    """A tracker whose package decides what it can show, and counts steps."""

    main_process_only, _step = False, None

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.tracker.config.update(values, **({"allow_val_change": True} if self.name == "wandb" else {}))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.tracker.log({key: _plain(value) for key, value in values.items()}, step=step, **kwargs)


class MLflowTracker(_Backend):
    """MLflow; MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID, MLFLOW_TAGS and MLFLOW_NESTED_RUN take precedence."""

    name, settings = "mlflow", "log_params"
    _told = ("run_id", "tags", "nested_run")

    def __init__(self, experiment_name: str | None = None, logging_dir: Any = None, **kwargs: Any) -> None:
        told = {name: os.environ.get(f"MLFLOW_{name.upper()}", kwargs.pop(name, None)) for name in self._told}
        super().__init__(os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name), logging_dir)
        tags = json.loads(told["tags"]) if isinstance(told["tags"], str) else told["tags"]
        nested = bool(str_to_bool(str(told.pop("nested_run") or False)))
        self.init_kwargs = {**kwargs, **told, "tags": tags, "nested": nested}  # `run_name` is the run's


def _backend(kind: str, title: str, name: str, base: type[_Backend] = _Backend, **marks: Any) -> Any:
    """A tracker that differs from the others in nothing but marks."""
    return type(kind, (base,), {"__doc__": f"{title}.", "__module__": __name__, "name": name, **marks})


WandBTracker = _backend("WandBTracker", "Weights & Biases", "wandb", _Service)
TrackioTracker = _backend("TrackioTracker", "Trackio", "trackio", _Service)
SwanLabTracker = _backend("SwanLabTracker", "SwanLab", "swanlab", _Service)
CometMLTracker = _backend("CometMLTracker", "Comet", "comet_ml", settings="native.log_parameters")
AimTracker = _backend("AimTracker", "Aim", "aim", settings="store_config", requires_logging_directory=True, named=True)
ClearMLTracker = _backend("ClearMLTracker", "ClearML", "clearml", settings="native.connect_configuration", named=True)
DVCLiveTracker = _backend("DVCLiveTracker", "DVCLive", "dvclive", settings="native.log_params", named=True)
_SHIPPED: Any = {one.name: one for one in (*_Backend.__subclasses__(), *_Service.__subclasses__())}
LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {k: _SHIPPED[k] for k in map(str, LoggerType) if k in _SHIPPED}


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let `log_with` know a class by its name."""
    if not issubclass(tracker_class, GeneralTracker):
        raise ValueError(f"`tracker_class` must be a subclass of `GeneralTracker`, but got {tracker_class}.")
    name = str(getattr(tracker_class, "name", tracker_class.__name__))
    if name in LOGGER_TYPE_TO_CLASS:
        said = f"A tracker with the name '{name}' is already registered and will be overwritten by {tracker_class}. This is especially significant when shadowing a built-in tracker."
        warnings.warn(said, stacklevel=2)
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def get_available_trackers() -> list[LoggerType]:
    """The trackers whose packages are installed."""
    installed = set(registry.installed())
    return [kind for kind in LoggerType if kind.value in installed]


def filter_trackers(log_with: Any, logging_dir: Any = None) -> list[Any]:
    """The trackers asked for that can run here: kinds or instances."""
    if log_with is None:
        return []
    asked = list(log_with) if isinstance(log_with, list | tuple) else [log_with]
    if any(str(one) == "all" for one in asked):
        return [one for one in asked if isinstance(one, GeneralTracker)] + get_available_trackers()
    found: dict[str, Any] = {}
    for one in asked:
        own = isinstance(one, GeneralTracker)
        found.setdefault(str(id(one)) if own else str(one), one if own else _runnable(str(one), logging_dir))
    return [kind for kind in found.values() if kind is not None]


def _runnable(name: str, logging_dir: Any) -> Any:
    """A kind of tracker by its name; None where its package is missing. Raises: ValueError for what cannot be."""
    if name not in LOGGER_TYPE_TO_CLASS:
        raise ValueError(f"Unsupported logging capability: {name}. Choose between {['all', *LOGGER_TYPE_TO_CLASS]}")
    if name in LoggerType and name not in registry.installed():
        logger.warning(f"Tried adding logger {name}, but package is unavailable in the system.")
        return None
    if getattr(LOGGER_TYPE_TO_CLASS[name], "requires_logging_directory", False) and logging_dir is None:
        raise ValueError(f"Logging with `{name}` requires a `logging_dir` to be passed in.")
    return LoggerType(name) if name in LoggerType else name


def chosen(log_with: Any, logging_dir: Any = None) -> list[Any]:
    """The trackers that `Accelerator(log_with=...)` asks for; a warning when none of them can run here."""
    found = filter_trackers(log_with, logging_dir)
    if log_with is not None and not found:
        said = f"`log_with={log_with}` was passed but no supported trackers are currently installed."
        warnings.warn(said, stacklevel=3)
    return found


def begin(
    kinds: list[Any], project: str, config: dict[str, Any] | None, init_kwargs: dict[str, Any], logging_dir: Any
) -> list[GeneralTracker]:
    """The trackers of a run, begun and told its settings. Ranks: every rank."""
    started: list[GeneralTracker] = []
    for kind in kinds:
        own = isinstance(kind, GeneralTracker)
        tracker: Any = kind if own else LOGGER_TYPE_TO_CLASS[str(kind)]
        if getattr(tracker, "main_process_only", True) and not process().is_main_process:
            continue
        if not own:
            place = {"logging_dir": logging_dir} if getattr(tracker, "requires_logging_directory", False) else {}
            tracker = tracker(project, **{**init_kwargs.get(str(kind), {}), **place})
        tracker.start()
        if config is not None:
            tracker.store_init_configuration(config)
        started.append(tracker)
    return started
