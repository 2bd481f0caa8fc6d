"""Tracker for SwanLab: its cloud, or `mode="local"` and `mode="offline"` with a folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from hasten.optional import need
from hasten.runtime import env as environment
from hasten.tracking.base import Entry, ImageEntry, Run, Tracker, to_rgb


class SwanlabTracker(Tracker):
    """Tracker that logs to a SwanLab run whose id is derived from the run id, so that a resume finds it."""

    name = "swanlab"
    package = "swanlab"
    package_versions = ">=0.7"

    def __init__(self, **options: Any) -> None:
        """Pass `options` to swanlab.init, for example `mode="local"`."""
        self._options = options
        self._run: Any = None  # Any: swanlab is an optional package
        self._swanlab: Any = None

    @property
    def native(self) -> Any:
        """The SwanLab run."""
        return self._run

    def start(self, run: Run) -> str:
        """Start the run, or continue that of the checkpoint."""
        self._swanlab = need("swanlab", ">=0.7", why='log_with="swanlab"')
        folder = Path(
            environment.snapshot().get("SWANLAB_LOG_DIR") or run.directory / "swanlab"
        )  # the user's choice takes precedence
        folder.mkdir(parents=True, exist_ok=True)
        if run.resume:
            run_id = run.resume.run_id
        else:
            run_id = hashlib.blake2b(run.run_id.encode(), digest_size=10).hexdigest()
        identity_options = {
            "name": run.run_id,
            "id": run_id,
            "resume": "allow",
            "log_dir": str(folder),
        }
        options = {
            "project": run.project,
            "config": run.shown_config,
            **identity_options,
            **self._options,
            **run.options,
        }
        self._run = self._swanlab.init(**options)
        return run_id

    def log(self, entry: Entry) -> None:
        """Log numbers as scalars and strings as texts."""
        values = dict(entry.numbers)
        for value_name, text in entry.texts.items():
            values[value_name] = self._swanlab.Text(text)
        self._run.log(values, step=entry.step, **entry.options)

    def log_images(self, entry: ImageEntry) -> None:
        """Log the images of a name together."""
        media = {}
        for value_name, images in entry.images.items():
            media[value_name] = [self._swanlab.Image(to_rgb(image)) for image in images]
        self._run.log(media, step=entry.step, **entry.options)

    def finish(self, failed: bool) -> None:
        """Finish the run; a failed training is marked as crashed."""
        if failed:
            self._run.finish(state="crashed", error="training raised an exception")
        else:
            self._run.finish()
