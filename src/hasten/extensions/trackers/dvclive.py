"""Tracker for DVCLive: plain files that DVC and its editor extension show."""

from __future__ import annotations

from typing import Any

from hasten.optional import need
from hasten.tracking.base import Entry, Run, Tracker


class DvcliveTracker(Tracker):
    """Tracker that writes to `<directory>/<project>/<run id>/dvclive`."""

    name = "dvclive"
    package = "dvclive"

    def __init__(self, **options: Any) -> None:
        """Pass `options` to dvclive.Live; a DVC experiment is saved only with `save_dvc_exp=True`."""
        self._options = options
        self._live: Any = None  # Any: dvclive is an optional package

    @property
    def native(self) -> Any:
        """The dvclive Live."""
        return self._live

    def start(self, run: Run) -> str:
        """Open the folder, or continue in that of the checkpoint."""
        dvclive = need("dvclive", why='log_with="dvclive"')
        folder = run.directory / run.project / run.run_id / "dvclive"
        options = {
            "dir": str(folder),
            "resume": run.resume is not None,
            "save_dvc_exp": False,
            "dvcyaml": False,
            **self._options,
            **run.options,
        }
        self._live = dvclive.Live(**options)
        if run.config and not run.resume:
            self._live.log_params(run.shown_config)
        return run.run_id

    def log(self, entry: Entry) -> None:
        """Log every value at its step."""
        self._live.step = entry.step
        for value_name, value in entry.values.items():
            self._live.log_metric(value_name, value, **entry.options)

    def flush(self) -> None:
        """Write the summary file."""
        self._live.make_summary()

    def finish(self, failed: bool) -> None:
        """Write the last files."""
        self._live.end()
