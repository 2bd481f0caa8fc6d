"""Tracker for ClearML, with a server or with `offline=True` to a local session folder."""

from __future__ import annotations

from typing import Any

from hasten.optional import need
from hasten.tracking.base import Entry, ImageEntry, Run, TableEntry, Tracker, to_gray


class ClearmlTracker(Tracker):
    """Tracker that logs to a ClearML task."""

    name = "clearml"
    package = "clearml"

    def __init__(self, *, offline: bool = False, **task_options: Any) -> None:
        """Pass `options` to clearml.Task.init."""
        self._options = {"offline": offline, **task_options}
        self._offline = offline
        self._task: Any = None  # Any: clearml is an optional package

    @property
    def native(self) -> Any:
        """The ClearML Task."""
        return self._task

    def start(self, run: Run) -> str:
        """Create the task, or continue that of the checkpoint."""
        task = need("clearml", why='log_with="clearml"').Task
        task_options = {
            "project_name": run.project,
            "task_name": run.run_id,
            "reuse_last_task_id": False,
            "continue_last_task": run.resume.run_id if run.resume else False,
            "auto_connect_frameworks": False,
            **self._options,
            **run.options,
        }
        self._offline = bool(task_options.pop("offline")) or task.is_offline()
        if self._offline:
            task.set_offline(offline_mode=True)
            # an offline session cannot be reopened; a resume starts another
            task_options["continue_last_task"] = False
        self._task = task.init(**task_options)
        # ClearML adds an offset to the steps of a continued task; hasten's steps are absolute already
        if run.resume:
            self._task.set_initial_iteration(0)
        if run.config:
            self._task.connect(run.shown_config, name="config")
        return str(self._task.id)

    def log(self, entry: Entry) -> None:
        """Report numbers as scalars (`title/series`) and strings as text."""
        logger = self._task.get_logger()
        for value_name, number in entry.numbers.items():
            title, series = _split_title(value_name)
            logger.report_scalar(
                title=title,
                series=series,
                value=number,
                iteration=entry.step,
                **entry.options,
            )
        for value_name, text in entry.texts.items():
            logger.report_text(
                f"step {entry.step} {value_name}: {text}", print_console=False
            )

    def log_images(self, entry: ImageEntry) -> None:
        """Report every image."""
        logger = self._task.get_logger()
        for value_name, images in entry.images.items():
            for index, image in enumerate(images):
                title, series = _split_title(value_name)
                if len(images) > 1:
                    series = f"{series}_{index}"
                logger.report_image(
                    title=title,
                    series=series,
                    iteration=entry.step,
                    image=to_gray(image),
                    **entry.options,
                )

    def log_table(self, entry: TableEntry) -> None:
        """Report the table with its header."""
        title, series = _split_title(entry.name)
        table = list(map(list, [entry.columns, *entry.rows]))
        logger = self._task.get_logger()
        logger.report_table(
            title=title,
            series=series,
            iteration=entry.step,
            table_plot=table,
            **entry.options,
        )

    def flush(self) -> None:
        """Send pending records."""
        self._task.flush()

    def finish(self, failed: bool) -> None:
        """Close the task, after marking a failed one."""
        # offline there is no server, and ClearML would retry forever
        if failed and not self._offline:
            self._task.mark_failed(
                ignore_errors=True, status_reason="training raised an exception"
            )
        self._task.close()


def _split_title(value_name: str) -> tuple[str, str]:
    """Return the ClearML plot and line of a name: `train/loss` is the line `loss` in the plot `train`."""
    title, slash, series = value_name.partition("/")
    return title, series if slash else value_name
