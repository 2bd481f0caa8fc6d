"""Tracker for Aim, writing to a repository folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hasten.optional import need
from hasten.tracking.base import Entry, ImageEntry, Run, Tracker, to_gray


class AimTracker(Tracker):
    """Tracker that logs to an Aim run in `<directory>/.aim`; show it with `aim up --repo <directory>`."""

    name = "aim"
    package = "aim"

    def __init__(self, **run_options: Any) -> None:
        """Pass `options` to aim.Run, for example `repo="aim://host:53800"`."""
        self._options = run_options
        self._run: Any = None  # Any: aim is an optional package
        self._aim: Any = None

    @property
    def native(self) -> Any:
        """The aim Run."""
        return self._run

    def start(self, run: Run) -> str:
        """Start a run, or reopen that of the checkpoint."""
        self._aim = need("aim", why='log_with="aim"')
        run.directory.mkdir(parents=True, exist_ok=True)
        run_options = {
            "repo": str(run.directory),
            "experiment": run.project,
            "capture_terminal_logs": False,
            "force_resume": run.resume is not None,
            **self._options,
            **run.options,
        }
        if run.resume:
            run_options.setdefault("run_hash", run.resume.run_id)
        self._run = self._aim.Run(**run_options)
        self._run.name = run.run_id
        if run.config:
            self._run["config"] = run.shown_config
        return str(self._run.hash)

    def store_config(self, values: Mapping[str, Any]) -> None:
        """Record settings of a run that was opened without them, where Aim's pages look for hyperparameters."""
        self._run["hparams"] = dict(values)

    def log(self, entry: Entry) -> None:
        """Track numbers as metrics and strings as texts."""
        for value_name, number in entry.numbers.items():
            self._run.track(number, name=value_name, step=entry.step, **entry.options)
        for value_name, text in entry.texts.items():
            self._run.track(
                self._aim.Text(text), name=value_name, step=entry.step, **entry.options
            )

    def log_images(self, entry: ImageEntry) -> None:
        """Track the images of a name as one sequence element."""
        for value_name, images in entry.images.items():
            aim_images = [self._aim.Image(to_gray(image)) for image in images]
            self._run.track(
                aim_images, name=value_name, step=entry.step, **entry.options
            )

    def finish(self, failed: bool) -> None:
        """Close the run; a failed one is tagged."""
        if failed:
            self._run.add_tag("failed")
        else:
            self._run.report_successful_finish()
        self._run.close()
