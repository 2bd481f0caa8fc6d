"""Tracker for Comet, online or with `online=False` to a zip archive."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from typing import Any

from hasten.optional import need
from hasten.runtime import env as environment
from hasten.tracking.base import Entry, Run, Tracker
from hasten.tracking.values import flatten_values


class CometTracker(Tracker):
    """Tracker that logs to a Comet experiment whose key is derived from the run id, so that a resume finds it."""

    name = "comet_ml"
    package = "comet_ml"

    def __init__(self, **options: Any) -> None:
        """Pass `options` to comet_ml.start, unknown ones to comet_ml.ExperimentConfig."""
        self._options = options
        self._experiment: Any = None  # Any: comet_ml is an optional package

    @property
    def native(self) -> Any:
        """The Comet experiment."""
        return self._experiment

    def start(self, run: Run) -> str:
        """Create the experiment, or continue that of the checkpoint."""
        comet = need("comet_ml", why='log_with="comet_ml"')
        start_options = {**self._options, **run.options}
        start_parameters = set(inspect.signature(comet.start).parameters)
        config_options = {}
        for name in set(start_options) - start_parameters:
            config_options[name] = start_options.pop(name)
        if "experiment_config" not in start_options:
            # the user's choice takes precedence
            user_folder = environment.snapshot().get("COMET_OFFLINE_DIRECTORY")
            if user_folder:
                folder = Path(user_folder)
            else:
                folder = run.directory / run.project / "comet"
            folder.mkdir(parents=True, exist_ok=True)
            start_options["experiment_config"] = comet.ExperimentConfig(
                **{"offline_directory": str(folder), **config_options}
            )
        if run.resume:
            experiment_key = run.resume.run_id
        else:
            experiment_key = hashlib.blake2b(
                run.run_id.encode(), digest_size=16
            ).hexdigest()
        identity_options = {"experiment_key": experiment_key, "mode": "get_or_create"}
        self._experiment = comet.start(
            **{"project": run.project, **identity_options, **start_options}
        )
        if run.config and not run.resume:
            self._experiment.log_parameters(dict(flatten_values(run.shown_config)))
        return str(self._experiment.get_key())

    def log(self, entry: Entry) -> None:
        """Log numbers as metrics and strings as other values."""
        self._experiment.log_metrics(entry.numbers, step=entry.step, **entry.options)
        if entry.texts:
            self._experiment.log_others(entry.texts)

    def finish(self, failed: bool) -> None:
        """End the experiment; offline, this writes the archive."""
        if failed:
            self._experiment.log_other("failed", True)
        self._experiment.end()
