"""Tracker for Trackio, writing to its local database or a Space."""

from __future__ import annotations

from typing import Any

from hasten.optional import need
from hasten.tracking.base import Entry, ImageEntry, Run, Tracker, to_rgb


class TrackioTracker(Tracker):
    """Tracker that logs to a Trackio run named by the run id; the package chooses the folder (variable TRACKIO_DIR)."""

    name = "trackio"
    package = "trackio"

    def __init__(self, **options: Any) -> None:
        """Pass `options` to trackio.init, for example `space_id=...`."""
        self._options = options
        self._run: Any = None  # Any: trackio is an optional package
        self._trackio: Any = None

    @property
    def native(self) -> Any:
        """The trackio Run."""
        return self._run

    def start(self, run: Run) -> str:
        """Start the run, or continue that of the checkpoint."""
        self._trackio = need("trackio", why='log_with="trackio"')
        run_name = run.resume.run_id if run.resume else run.run_id
        identity_options = {
            "name": run_name,
            "resume": "must" if run.resume else "never",
            "embed": False,
        }
        options = {
            "project": run.project,
            "config": run.shown_config,
            **identity_options,
            **self._options,
            **run.options,
        }
        self._run = self._trackio.init(**options)
        return run_name

    def log(self, entry: Entry) -> None:
        """Log the values at their step."""
        self._run.log(dict(entry.values), step=entry.step, **entry.options)

    def log_images(self, entry: ImageEntry) -> None:
        """Log every image."""
        media = {}
        for value_name, images in entry.images.items():
            for index, image in enumerate(images):
                tag = value_name if len(images) == 1 else f"{value_name}_{index}"
                media[tag] = self._trackio.Image(to_rgb(image))
        self._run.log(media, step=entry.step, **entry.options)

    def finish(self, failed: bool) -> None:
        """Finish the run; the package sends pending records."""
        self._run.finish()
