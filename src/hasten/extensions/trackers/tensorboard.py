"""Tracker for TensorBoard event files, through torch's SummaryWriter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hasten.optional import need
from hasten.tracking.base import Entry, ImageEntry, Run, Tracker
from hasten.tracking.values import flatten_values


class TensorboardTracker(Tracker):
    """Tracker that writes event files to `<directory>/<project>/<run id>`; show them with `tensorboard --logdir <directory>`."""

    name = "tensorboard"
    package = "tensorboard"

    def __init__(self, **options: Any) -> None:
        """Pass `options` to SummaryWriter."""
        self._options = options
        self._folder = Path()
        self._writer: Any = None  # Any: torch is not imported by this module's types

    @property
    def native(self) -> Any:
        """The SummaryWriter."""
        return self._writer

    def start(self, run: Run) -> str:
        """Open a writer; on a resume, hide values that an earlier process logged after the checkpoint."""
        need("tensorboard", why='log_with="tensorboard"')
        self._options = {**self._options, **run.options}
        self._folder = run.directory / run.project / run.run_id
        self._open_writer(purge_step=run.resume.step + 1 if run.resume else None)
        if run.config and not run.resume:
            self._write_config(run)
        return run.run_id

    def log(self, entry: Entry) -> None:
        """Add one scalar or text per value."""
        for value_name, number in entry.numbers.items():
            self._writer.add_scalar(
                value_name, number, entry.step, walltime=entry.time_s, **entry.options
            )
        for value_name, text in entry.texts.items():
            self._writer.add_text(value_name, text, entry.step, walltime=entry.time_s)

    def log_images(self, entry: ImageEntry) -> None:
        """Add the images, with an index after the name if there are several."""
        for value_name, images in entry.images.items():
            for index, image in enumerate(images):
                tag = value_name if len(images) == 1 else f"{value_name}/{index}"
                options = {"dataformats": "HWC", **entry.options}
                self._writer.add_image(
                    tag, image, entry.step, walltime=entry.time_s, **options
                )

    def rewind(self, step: int) -> None:
        """Open another event file that hides the steps after `step`."""
        self._writer.close()
        self._open_writer(purge_step=step + 1)

    def flush(self) -> None:
        """Write pending events."""
        self._writer.flush()

    def finish(self, failed: bool) -> None:
        """Close the writer."""
        self._writer.close()

    def _open_writer(self, purge_step: int | None) -> None:
        writer = need("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(
            **{"log_dir": str(self._folder), "purge_step": purge_step, **self._options}
        )

    def _write_config(self, run: Run) -> None:
        self._writer.add_text(
            "config", f"```json\n{json.dumps(run.shown_config, indent=2)}\n```", 0
        )
        settings = {}
        for value_name, value in flatten_values(run.shown_config):
            is_scalar = isinstance(value, (bool, int, float, str))
            settings[value_name] = value if is_scalar else json.dumps(value)
        for summary in need("torch.utils.tensorboard.summary").hparams(settings, {}):
            self._writer.file_writer.add_summary(summary)
