"""Trackers with the established interface: one class for each package, which is told what the original tells it."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from accelerate._impl.enums import LoggerType
from accelerate._impl.environment.variables import str_to_bool
from accelerate._impl.surface.lazy import Deferred
from accelerate._impl.surface.messages import message
from accelerate._impl.surface.shown import shown_property
from accelerate._impl.views.logging import get_logger
from accelerate._impl.views.state import PartialState
from hasten.optional import need
from hasten.tracking import registry
from hasten.tracking.values import plain_config

logger = get_logger("accelerate.tracking")
yaml = Deferred("yaml")
# Any in this file: values of every kind, and foreign packages' objects.


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a tracker's method, run on the main process only when the tracker says so."""

    @wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        # one run, whatever the mark says
        if isinstance(self, _Package) or getattr(self, "main_process_only", False):
            return PartialState().on_main_process(function)(self, *args, **kwargs)
        return function(self, *args, **kwargs)

    return run


class GeneralTracker:
    """Base of all trackers: needs `name`, `requires_logging_directory` and the property `tracker`."""

    main_process_only = True

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        missing = []
        for attribute_name in ("name", "requires_logging_directory", "tracker"):
            if attribute_name not in dir(self):
                missing.append(attribute_name)
        if missing:
            raise NotImplementedError(
                message(
                    "tracker_incomplete",
                    ", ".join(f"`{attribute}`" for attribute in missing),
                )
            )

    def start(self) -> None:
        """Begin the run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the run's settings."""

    def log(
        self, values: dict[str, Any], step: int | None = None, **kwargs: Any
    ) -> None:
        """Record values."""

    def finish(self) -> None:
        """End the run."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


class _Package(GeneralTracker):
    """A tracker of a package whose run logs dicts, counts steps and has a table of settings."""

    name = ""
    requires_logging_directory = False
    # the attribute that holds the package's object; its method that ends the run
    kept_as = "run"
    ended_by = "finish"
    # its method that records settings, where the package has no table of them
    settings = ""
    writer: Any
    task: Any
    _record_configuration: Any

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    tracker = shown_property(
        lambda self: getattr(self, self.kept_as), "The package's own run or writer."
    )
    _module = shown_property(
        lambda self: (
            sys.modules[self.name] if self.name in sys.modules else need(self.name)
        ),
        "The package.",
    )

    def _open_run(self) -> Any:
        """Begin the run and return the package's object."""
        return self._module.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def start(self) -> None:
        setattr(self, self.kept_as, self._open_run())

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        if self.settings:
            getattr(self.tracker, self.settings)(values)
        else:
            self._module.config.update(values, allow_val_change=True)

    @on_main_process
    def log(
        self, values: dict[str, Any], step: int | None = None, **kwargs: Any
    ) -> None:
        self.tracker.log(values, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        getattr(self.tracker, self.ended_by)()

    def _iterate_fitting(
        self,
        values: dict[str, Any],
        words: str,
        fits: Callable[[Any], bool] = _is_number,
    ) -> Iterator[tuple[str, Any]]:
        """Yield what the package can plot, and warn of the rest in its words."""
        for key, value in values.items():
            if fits(value):
                yield key, value
            else:
                rejected_text = (
                    f'a value of "{value}" of type {type(value)} for key "{key}" as a'
                )
                logger.warning_once(
                    words.replace("a value", rejected_text, 1)
                    + " so we dropped this attribute."
                )


_ADDERS: Any = (
    (str, "add_text"),
    (dict, "add_scalars"),
    ((bool, int, float), "add_scalar"),
)


class TensorBoardTracker(_Package):
    name = "tensorboard"
    requires_logging_directory = True
    kept_as = "writer"
    ended_by = "close"

    def __init__(self, run_name: str, logging_dir: Any, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir_param = logging_dir

    def _open_run(self) -> Any:
        self.logging_dir = str(Path(self.logging_dir_param) / str(self.run_name))
        return need("torch.utils.tensorboard").SummaryWriter(
            self.logging_dir, **self.init_kwargs
        )

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the run's settings for the HPARAMS tab and as hparams.yml, in a folder named by the time."""
        config = plain_config(values)
        moment = str(time.time())
        plain = (int, float, str, type(None))
        shown = {}
        for setting_name, setting in config.items():
            shown[setting_name] = (
                setting if isinstance(setting, plain) else json.dumps(setting)
            )
        self.writer.add_hparams(shown, metric_dict={}, run_name=moment)
        self.writer.flush()
        folder = Path(self.logging_dir) / moment
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hparams.yml").write_text(yaml.safe_dump(config))

    @on_main_process
    def log(
        self, values: dict[str, Any], step: int | None = None, **kwargs: Any
    ) -> None:
        """Plot numbers and dicts of numbers, and show strings; nothing is recorded of values that are neither."""
        for scalar_name, logged in values.items():
            is_scalar = hasattr(logged, "item") and getattr(logged, "shape", ()) in (
                (),
                (1,),
            )
            scalar_value = logged.item() if is_scalar else logged
            add = None
            for value_type, method in _ADDERS:
                if isinstance(scalar_value, value_type):
                    add = method
                    break
            if add is None:
                logger.debug(
                    f"{scalar_name} is a {type(scalar_value).__name__}, which TensorBoard cannot plot: left out"
                )
            else:
                getattr(self.writer, add)(
                    scalar_name, scalar_value, global_step=step, **kwargs
                )
        self.writer.flush()

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, **kwargs: Any
    ) -> None:
        """Record batches of images; keywords such as `dataformats` go to the writer's add_images."""
        for image_name, images in values.items():
            self.writer.add_images(image_name, images, global_step=step, **kwargs)


class _Tables(_Package):
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
        self._record_configuration(
            table_name,
            {"columns": columns, "data": data, "dataframe": dataframe},
            step,
            kwargs,
        )


class TrackioTracker(_Package):
    name = "trackio"
    main_process_only = False


class WandBTracker(_Tables):
    name = "wandb"
    main_process_only = False

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, **kwargs: Any
    ) -> None:
        self.log(
            {
                key: list(map(self._module.Image, images))
                for key, images in values.items()
            },
            step,
            **kwargs,
        )

    def _record_configuration(
        self, name: str, table: dict[str, Any], step: int | None, kwargs: dict[str, Any]
    ) -> None:
        self.log({name: self._module.Table(**table)}, step, **kwargs)


class SwanLabTracker(_Package):
    name = "swanlab"
    main_process_only = False
    log_images = WandBTracker.log_images

    def _open_run(self) -> Any:
        run = super()._open_run()
        self._module.config["FRAMEWORK"] = "🤗Accelerate"
        return run


class CometMLTracker(_Package):
    name = "comet_ml"
    kept_as = "writer"
    ended_by = "end"
    settings = "log_parameters"

    def _open_run(self) -> Any:
        return self._module.start(project_name=self.run_name, **self.init_kwargs)

    @on_main_process
    def log(
        self, values: dict[str, Any], step: int | None = None, **kwargs: Any
    ) -> None:
        """Record numbers, strings, and dicts of numbers; other values are left out."""
        if step is not None:
            self.writer.set_step(step)
        for scalar_name, scalar_value in values.items():
            if _is_number(scalar_value):
                self.writer.log_metric(scalar_name, scalar_value, step=step, **kwargs)
            elif isinstance(scalar_value, str):
                self.writer.log_other(scalar_name, scalar_value, **kwargs)
            elif isinstance(scalar_value, dict):
                self.writer.log_metrics(scalar_value, step=step, **kwargs)


class AimTracker(_Package):
    name = "aim"
    requires_logging_directory = True
    kept_as = "writer"
    ended_by = "close"

    def __init__(self, run_name: str, logging_dir: Any = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    def _open_run(self) -> Any:
        run = self._module.Run(repo=self.aim_repo_path, **self.init_kwargs)
        run.name = self.run_name
        return run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer["hparams"] = values

    @on_main_process
    def log(
        self, values: dict[str, Any], step: int | None = None, **kwargs: Any
    ) -> None:
        for scalar_name, scalar_value in values.items():
            self.writer.track(scalar_value, name=scalar_name, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: Any = None
    ) -> None:
        """Record images, or pairs of an image and its caption; `kwargs` holds those of `aim_image` and of `track`."""
        image_options, track_options = (
            (kwargs or {}).get(image_name, {}) for image_name in ("aim_image", "track")
        )
        for image_name, image_or_pair in values.items():
            image, caption = (
                image_or_pair
                if isinstance(image_or_pair, tuple)
                else (image_or_pair, "")
            )
            self.writer.track(
                self._module.Image(image, caption=caption, **image_options),
                name=image_name,
                step=step,
                **track_options,
            )


def _forward_call(name: str, *names: str, **plain: Any) -> Any:
    """Return a method that calls the package's function of this name, with arguments by their names."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> None:
        getattr(self._module, name)(
            **{**plain, **dict(zip(names, args, strict=False)), **kwargs}
        )

    return on_main_process(forward)


class MLflowTracker(_Package):
    """MLflow; MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID, MLFLOW_TAGS and MLFLOW_NESTED_RUN take precedence."""

    name = "mlflow"
    kept_as = "active_run"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: Any = None,
        run_id: str | None = None,
        tags: Any = None,
        nested_run: Any = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name)
        variable_or = os.environ.get
        self.experiment_name = variable_or("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = logging_dir
        self.run_id = variable_or("MLFLOW_RUN_ID", run_id)
        self.description = description
        tags = variable_or("MLFLOW_TAGS", tags)
        if isinstance(tags, str):
            self.tags = json.loads(tags)
        else:
            self.tags = tags
        self.nested_run = bool(
            str_to_bool(variable_or("MLFLOW_NESTED_RUN", str(nested_run or False)))
        )

    def _open_run(self) -> Any:
        mlflow = self._module
        experiment_name = self.experiment_name
        experiments = mlflow.search_experiments(
            filter_string=f"name = '{experiment_name}'"
        )
        if len(experiments) > 0:
            experiment = experiments[0].experiment_id
        else:
            experiment = mlflow.create_experiment(
                name=experiment_name, artifact_location=self.logging_dir, tags=self.tags
            )
        run = {
            "run_id": self.run_id,
            "run_name": self.run_name,
            "nested": self.nested_run,
            "tags": self.tags,
        }
        return mlflow.start_run(
            experiment_id=experiment, description=self.description, **run
        )

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record settings, but for those that are too long for MLflow, in batches of the size that it takes."""
        bounds = self._module.utils.validation
        for setting_name, setting_value in list(values.items()):
            if len(str(setting_value)) > bounds.MAX_PARAM_VAL_LENGTH:
                logger.warning_once(
                    message(
                        "mlflow_long_value",
                        setting_value,
                        setting_name,
                        bounds.MAX_PARAM_VAL_LENGTH,
                    )
                )
                del values[setting_name]
        remaining_items = iter(values.items())
        while parameter_batch := dict(
            islice(remaining_items, bounds.MAX_PARAMS_TAGS_PER_BATCH)
        ):
            self._module.log_params(parameter_batch)

    @on_main_process
    def log(
        self, values: dict[str, Any], step: int | None = None, **kwargs: Any
    ) -> None:
        self._module.log_metrics(
            dict(self._iterate_fitting(values, message("mlflow_metric"))),
            step=step,
            **kwargs,
        )

    log_figure = _forward_call("log_figure", "figure", "artifact_file")
    log_artifacts = _forward_call(
        "log_artifacts", "local_dir", "artifact_path", artifact_path=None
    )
    log_artifact = _forward_call(
        "log_artifact", "local_path", "artifact_path", artifact_path=None
    )

    @on_main_process
    def finish(self) -> None:
        self._module.end_run()


class ClearMLTracker(_Tables):
    """ClearML; a task that the script began is used, and left open."""

    name = "clearml"
    kept_as = "task"
    ended_by = "close"
    settings = "connect_configuration"
    _initialized_externally = False

    def _open_run(self) -> Any:
        kind = self._module.Task
        if running := kind.current_task():
            self._initialized_externally = True
            return running
        names = {}
        for entry_name in ("project", "task"):
            names[entry_name] = os.environ.get(
                f"CLEARML_{entry_name.upper()}", self.run_name
            )
        return kind.init(
            **{
                **{
                    f"{entry_name}_name": setting
                    for entry_name, setting in names.items()
                },
                **self.init_kwargs,
            }
        )

    @on_main_process
    def log(
        self, values: dict[str, Any], step: int | None = None, **kwargs: Any
    ) -> None:
        """Plot numbers, or without a step show each alone; names that begin with train_, eval_ or test_ are lines of a plot."""
        log = self.task.get_logger()
        for scalar_name, scalar_value in self._iterate_fitting(
            values, message("clearml_scalar")
        ):
            if step is None:
                log.report_single_value(name=scalar_name, value=scalar_value, **kwargs)
            else:
                log.report_scalar(
                    **_plot_title(scalar_name),
                    value=scalar_value,
                    iteration=step,
                    **kwargs,
                )

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, **kwargs: Any
    ) -> None:
        log = self.task.get_logger()
        for image_name, image in values.items():
            log.report_image(
                **_plot_title(image_name), iteration=step, image=image, **kwargs
            )

    def _record_configuration(
        self, name: str, table: dict[str, Any], step: int | None, kwargs: dict[str, Any]
    ) -> None:
        rows = table["dataframe"]
        if rows is None and table["data"] is None:
            raise ValueError(
                "`ClearMLTracker.log_table` requires that `data` to be supplied if `dataframe` is `None`"
            )
        if rows is None:
            if table["columns"]:
                rows = [table["columns"], *table["data"]]
            else:
                rows = table["data"]
        self.task.get_logger().report_table(
            **_plot_title(name), table_plot=rows, iteration=step, **kwargs
        )

    @on_main_process
    def finish(self) -> None:
        if self.task and not self._initialized_externally:
            self.task.close()


def _plot_title(name: str) -> dict[str, str]:
    line, _, metric_name = name.partition("_")
    if line in ("train", "eval", "test") and metric_name:
        return {"title": metric_name, "series": line}
    return {"title": name, "series": "train"}


class DVCLiveTracker(_Package):
    """DVCLive, with a `live` of the script's own if one is given."""

    name = "dvclive"
    kept_as = "live"
    ended_by = "end"
    settings = "log_params"

    def __init__(
        self, run_name: str | None = None, live: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(run_name, **kwargs)
        self.live = live

    def _open_run(self) -> Any:
        if self.live is not None:
            return self.live
        return self._module.Live(**self.init_kwargs)

    @on_main_process
    def log(
        self, values: dict[str, Any], step: int | None = None, **kwargs: Any
    ) -> None:
        if step is not None:
            self.live.step = step
        fits = import_module("dvclive.plots").Metric.could_log
        for scalar_name, scalar_value in self._iterate_fitting(
            values, message("dvclive_metric"), fits
        ):
            self.live.log_metric(scalar_name, scalar_value, **kwargs)
        self.live.next_step()


_SHIPPED: Any = {
    one.name: one for one in (*_Package.__subclasses__(), *_Tables.__subclasses__())
}
LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {
    k: _SHIPPED[k] for k in map(str, LoggerType) if k in _SHIPPED
}


def register_tracker_class(tracker_class: object) -> None:
    if not isinstance(tracker_class, type) or not issubclass(
        tracker_class, GeneralTracker
    ):
        raise ValueError(
            f"`tracker_class` must be a subclass of `GeneralTracker`, but got {tracker_class}."
        )
    tracker_name = getattr(tracker_class, "name", None)
    if not tracker_name:
        raise ValueError(
            "The tracker class to register must define a non-empty `name` attribute."
        )
    if not hasattr(tracker_class, "requires_logging_directory"):
        raise ValueError(message("tracker_without_directory_mark"))
    if tracker_name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(
            message("tracker_replaced", tracker_name, tracker_class), stacklevel=2
        )
    LOGGER_TYPE_TO_CLASS[str(tracker_name)] = tracker_class


def get_available_trackers() -> list[LoggerType]:
    installed = set(registry.installed_trackers())
    return [logger_type for logger_type in LoggerType if logger_type.value in installed]


def filter_trackers(log_with: Any, logging_dir: Any = None) -> list[Any]:
    """Return the trackers asked for that can run here: kinds or instances."""
    if log_with is None:
        return []
    if isinstance(log_with, list | tuple):
        requested = list(log_with)
    else:
        requested = [log_with]
    if any(str(kind_or_tracker) == "all" for kind_or_tracker in requested):
        return [
            kind_or_tracker
            for kind_or_tracker in requested
            if isinstance(kind_or_tracker, GeneralTracker)
        ] + get_available_trackers()
    trackers_by_key: dict[str, Any] = {}
    for kind_or_tracker in requested:
        is_instance = isinstance(kind_or_tracker, GeneralTracker)
        trackers_by_key.setdefault(
            str(id(kind_or_tracker)) if is_instance else str(kind_or_tracker),
            kind_or_tracker
            if is_instance
            else _runnable_kind(str(kind_or_tracker), logging_dir),
        )
    return [
        tracker_kind
        for tracker_kind in trackers_by_key.values()
        if tracker_kind is not None
    ]


def _runnable_kind(name: str, logging_dir: Any) -> Any:
    """Return a kind of tracker by its name; None where its package is missing. Raises: ValueError for what cannot be."""
    if name not in LOGGER_TYPE_TO_CLASS:
        raise ValueError(
            f"Unsupported logging capability: {name}. Choose between {['all', *LOGGER_TYPE_TO_CLASS]}"
        )
    if name in LoggerType and LoggerType(name) not in get_available_trackers():
        logger.debug(
            f"Tried adding logger {name}, but package is unavailable in the system."
        )
        return None
    if (
        getattr(LOGGER_TYPE_TO_CLASS[name], "requires_logging_directory", False)
        and logging_dir is None
    ):
        raise ValueError(
            f"Logging with `{name}` requires a `logging_dir` to be passed in."
        )
    return LoggerType(name) if name in LoggerType else name


def begin(
    kinds: list[Any],
    project: str,
    config: dict[str, Any] | None,
    init_kwargs: dict[str, Any],
    logging_dir: Any,
) -> list[GeneralTracker]:
    """Return the trackers of a run, begun and told its settings; none away from the main process. Ranks: any."""
    started: list[GeneralTracker] = []
    for tracker_kind in kinds if PartialState().is_main_process else ():
        tracker: Any = tracker_kind
        if not isinstance(tracker_kind, GeneralTracker):
            tracker_class: Any = LOGGER_TYPE_TO_CLASS[str(tracker_kind)]
            if getattr(tracker_class, "requires_logging_directory", False):
                folder_arguments = [logging_dir]
            else:
                folder_arguments = []
            tracker = tracker_class(
                project, *folder_arguments, **init_kwargs.get(str(tracker_kind), {})
            )
        tracker.start()
        if config is not None:
            tracker.store_init_configuration(config)
        started.append(tracker)
    return started
