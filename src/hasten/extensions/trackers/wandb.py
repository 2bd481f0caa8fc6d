"""Tracker for Weights & Biases, online or with `mode="offline"`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hasten.optional import need
from hasten.runtime import env as environment
from hasten.tracking.base import Entry, ImageEntry, Run, TableEntry, Tracker, to_gray


class WandbTracker(Tracker):
    """Tracker that logs to a wandb run whose id hasten chooses, so that a resume finds it."""

    name = "wandb"
    package = "wandb"

    def __init__(self, **options: Any) -> None:
        """Pass `options` to wandb.init, for example `mode="offline"` or `entity=...`."""
        self._options = options
        self._run: Any = None  # Any: wandb is an optional package
        self._wandb: Any = None

    @property
    def native(self) -> Any:
        """The wandb Run."""
        return self._run

    def start(self, run: Run) -> str:
        """Start the run, or continue that of the checkpoint."""
        self._wandb = need("wandb", why='log_with="wandb"')
        env = environment.snapshot()
        # the user's choice takes precedence
        folder = env.get("WANDB_DIR") or str(run.directory)
        if run.resume:
            run_id = run.resume.run_id
        else:
            run_id = env.get("WANDB_RUN_ID") or run.run_id
        identity_options = {
            "dir": folder,
            "id": run_id,
            "resume": "allow",
            "reinit": "create_new",
        }
        Path(folder).mkdir(parents=True, exist_ok=True)
        options = {
            "project": run.project,
            "config": run.shown_config,
            **identity_options,
            **self._options,
            **run.options,
        }
        self._run = self._wandb.init(**options)
        return str(self._run.id)

    def log(self, entry: Entry) -> None:
        """Log the values at their step and time."""
        self._run.log(
            {"_timestamp": entry.time_s, **entry.values},
            step=entry.step,
            **entry.options,
        )

    def log_images(self, entry: ImageEntry) -> None:
        """Log the images as wandb media."""
        media = {}
        for value_name, images in entry.images.items():
            media[value_name] = [self._wandb.Image(to_gray(image)) for image in images]
        self._run.log(media, step=entry.step, **entry.options)

    def log_table(self, entry: TableEntry) -> None:
        """Log a wandb Table."""
        rows = list(map(list, entry.rows))
        table = self._wandb.Table(columns=list(entry.columns), data=rows)
        self._run.log({entry.name: table}, step=entry.step, **entry.options)

    def finish(self, failed: bool) -> None:
        """Finish the run; a failed training is marked as crashed."""
        self._run.finish(exit_code=1 if failed else 0)
