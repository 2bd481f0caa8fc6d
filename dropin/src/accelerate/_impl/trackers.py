"""Trackers with the established interface: hasten's backends underneath, users' own classes beside them."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from accelerate._impl.ambient import process
from accelerate._impl.enums import LoggerType
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
                "The implementation for this tracker class is missing the following required attributes. Please define "
                f"them in the class definition: {', '.join(missing)}"
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
    new_each_time = False
    """Whether runs of one project are told apart by an id of their own."""
    takes_any_value = False
    """Whether the package itself decides what it can show; others get single numbers and strings."""

    def __init__(self, run_name: str | None = None, logging_dir: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name or "run"
        self.logging_dir = logging_dir
        self.init_kwargs = kwargs
        self._run: Any = None
        self._begun, self._step = False, -1
        self._config: dict[str, Any] = {}

    def start(self) -> None:
        self._begun = True

    def _open(self) -> Any:
        """hasten's tracker, opened when it is first needed: settings are given with the run, and come after its start."""
        if self._run is None:
            self._run = registry.build(self.name)[0]
            folder = Path(self.logging_dir or "runs")
            name = self.run_name
            ident = f"{name}-{uuid4().hex[:8]}" if self.new_each_time else name
            options = ({"dir": None} if self.name == "wandb" else {}) | self.init_kwargs  # wandb finds its own folder
            self._run.start(Run(project=name, run_id=ident, directory=folder, config=self._config, options=options))
        return self._run

    tracker = run = writer = shown(lambda self: self._open().native, "The package's own run or writer.")

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._config = dict(plain_config(values))
        if self._run is not None:  # values were logged before the settings: open the run again with them
            self._run.finish(False)
            self._run = None
        self._open()

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._step = self._step + 1 if step is None else int(step)
        plain = {key: _plain(value) for key, value in flatten(values)}
        kept = {key: value for key, value in plain.items() if self.takes_any_value or _is_scalar(value)}
        if len(kept) < len(plain):
            left_out = sorted(plain.keys() - kept.keys())
            logger.debug(f"{self.name} takes single numbers and strings: {left_out} left out")
        self._open().log(Entry(values=kept, step=self._step, time_s=time.time(), options=kwargs))

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images."""
        images = {key: as_pixels(key, value) for key, value in values.items()}
        self._open().log_images(ImageEntry(images=images, step=step or 0, time_s=time.time(), options=kwargs))

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
        entry = TableEntry(
            name=table_name, columns=columns, rows=data, step=step or 0, time_s=time.time(), options=kwargs
        )
        self._open().log_table(entry)

    @on_main_process
    def finish(self) -> None:
        if self._begun:
            self._open().flush()
            self._open().finish(False)
            self._run, self._begun = None, False


_ADDERS: Any = ((str, "add_text"), (dict, "add_scalars"), ((bool, int, float), "add_scalar"))


class TensorBoardTracker(_Backend):
    """TensorBoard."""

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: Any, **kwargs: Any) -> None:
        super().__init__(run_name, logging_dir, **{"log_dir": str(Path(logging_dir) / run_name), **kwargs})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the run's settings for the HPARAMS tab and as hparams.yml, in a folder named by the time."""
        config = plain_config(values)
        shown = {
            name: value if value is None or _is_scalar(value) else json.dumps(value) for name, value in config.items()
        }
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


class MLflowTracker(_Backend):
    """MLflow."""

    name = "mlflow"

    def __init__(self, experiment_name: str | None = None, logging_dir: Any = None, **kwargs: Any) -> None:
        super().__init__(experiment_name, logging_dir)
        self.init_kwargs = kwargs  # `run_name` among them is the run's, not the experiment's


def _backend(kind: str, title: str, name: str, **marks: bool) -> Any:
    """A tracker that differs from the others in nothing but marks."""
    return type(kind, (_Backend,), {"__doc__": f"{title}.", "__module__": __name__, "name": name, **marks})


_SERVED: Any = {"takes_any_value": True, "main_process_only": False, "new_each_time": True}
WandBTracker = _backend("WandBTracker", "Weights & Biases", "wandb", **_SERVED)
TrackioTracker = _backend("TrackioTracker", "Trackio", "trackio", **_SERVED)
CometMLTracker = _backend("CometMLTracker", "Comet", "comet_ml", new_each_time=True)
AimTracker = _backend("AimTracker", "Aim", "aim", requires_logging_directory=True)
ClearMLTracker = _backend("ClearMLTracker", "ClearML", "clearml")
DVCLiveTracker = _backend("DVCLiveTracker", "DVCLive", "dvclive")
SwanLabTracker = _backend("SwanLabTracker", "SwanLab", "swanlab", **_SERVED)
LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {shipped.name: shipped for shipped in _Backend.__subclasses__()}


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let `log_with` know a class by its name."""
    LOGGER_TYPE_TO_CLASS[str(getattr(tracker_class, "name", tracker_class.__name__))] = tracker_class


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
        warnings.warn(
            f"`log_with={log_with}` was passed but no supported trackers are currently installed.", stacklevel=3
        )
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
