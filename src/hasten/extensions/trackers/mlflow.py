"""Tracker for MLflow: a server, or a local store when none is configured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hasten.optional import check_installed, need
from hasten.tracking.base import Entry, Run, Tracker
from hasten.tracking.values import flatten_values

_BATCH = 100  # largest number of parameters in one call of MLflow


class MlflowTracker(Tracker):
    """Tracker that logs to a run of the experiment named like the project, with an explicit client; it is not MLflow's active run."""

    name = "mlflow"
    package = "mlflow"

    def __init__(
        self,
        *,
        tracking_uri: str | None = None,
        **options: Any,
    ) -> None:
        """Create a tracker with the options `run_name` and `tags`; the default store is MLflow's setting or a local folder."""
        self._uri = tracking_uri
        self._options = options
        self._mlflow: Any = None  # Any: mlflow is an optional package
        self.client: Any = None
        self.run_id = ""
        # artifact folder of a new experiment; None = the store decides
        self._artifacts: str | None = None
        self.tracking_uri = ""

    @property
    def native(self) -> Any:
        """The MLflow run, fetched again on each access."""
        return self.client.get_run(self.run_id)

    def start(self, run: Run) -> str:
        """Create the run, or set that of the checkpoint running again."""
        self._mlflow = need("mlflow", why='log_with="mlflow"')
        options = {**self._options, **run.options}
        tracking_address = options.pop("tracking_uri", self._uri)
        self.tracking_uri = tracking_address or self._default_uri(run)
        self.client = self._mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        if run.resume:
            self.run_id = run.resume.run_id
            self.client.update_run(self.run_id, status="RUNNING")
        else:
            self._create_run(run, options)
        return self.run_id

    def _default_uri(self, run: Run) -> str:
        """Return MLflow's setting if there is one, else a local database."""
        if self._mlflow.is_tracking_uri_set():
            return str(self._mlflow.get_tracking_uri())
        check_installed(
            "alembic",
            why='the local database of log_with="mlflow", unless tracking_uri names a server',
        )
        run.directory.mkdir(parents=True, exist_ok=True)
        folder = run.directory.absolute()
        self._artifacts = (folder / "mlartifacts").as_uri()
        return f"sqlite:///{folder / 'mlflow.db'}"

    def _create_run(self, run: Run, options: dict[str, Any]) -> None:
        experiment = self._find_experiment(run.project)
        created = self.client.create_run(
            experiment, **{"run_name": run.run_id, **options}
        )
        self.run_id = created.info.run_id
        self.log_params(dict(flatten_values(run.shown_config)))

    def _find_experiment(self, value_name: str) -> str:
        """Return the id of the experiment of this name, which is created if there is none."""
        existing_experiment = self.client.get_experiment_by_name(value_name)
        if existing_experiment:
            return str(existing_experiment.experiment_id)
        return str(self.client.create_experiment(value_name, self._artifacts))

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Record settings, in batches that MLflow accepts."""
        params = []
        for value_name, value in values.items():
            params.append(self._mlflow.entities.Param(value_name, str(value)))
        for batch_start in range(0, len(params), _BATCH):
            self.client.log_batch(
                self.run_id, params=params[batch_start : batch_start + _BATCH]
            )

    def log(self, entry: Entry) -> None:
        """Log numbers as metrics and strings as tags, in one call."""
        entities = self._mlflow.entities
        time_ms = int(entry.time_s * 1000)
        metrics = []
        for value_name, number in entry.numbers.items():
            metrics.append(entities.Metric(value_name, number, time_ms, entry.step))
        tags = [entities.RunTag(name, text) for name, text in entry.texts.items()]
        self.client.log_batch(self.run_id, metrics=metrics, tags=tags, **entry.options)

    def finish(self, failed: bool) -> None:
        """Set the final status."""
        status = "FAILED" if failed else "FINISHED"
        self.client.set_terminated(self.run_id, status=status)
