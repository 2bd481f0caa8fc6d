"""Progress of a run for Kubeflow's TrainJob: percentage, time left and metrics, posted to its status endpoint by a thread."""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import (
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    build_opener,
)

from torch import Tensor

from hasten.optim.run_part import RunPart
from hasten.progress.meter import MeterReading
from hasten.progress.scalars import LateScalars
from hasten.runtime import env

log = logging.getLogger(__name__)

URL: Final = "KUBEFLOW_TRAINER_SERVER_URL"
CA_CERT: Final = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN: Final = "KUBEFLOW_TRAINER_SERVER_TOKEN"

_POST_INTERVAL_S: Final = 5.0
_TIMEOUT_S: Final = 5.0
_LAST_TIMEOUT_S: Final = 2.0
_MAX_METRICS: Final = 50
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


class _NoRedirect(HTTPRedirectHandler):
    """Handler that follows no redirect, which would send the token to another host."""

    def redirect_request(self, *unused: Any) -> None:  # Any: arguments of urllib
        """Refuse the redirect."""


@dataclass(frozen=True, slots=True)
class StatusEndpoint:
    """Address of the status endpoint, with the files of its certificate authority and of the pod's token."""

    url: str
    ca_cert: str | None = None
    token: str | None = None

    @classmethod
    def from_env(cls, variables: Mapping[str, str]) -> StatusEndpoint | None:
        """Return the endpoint that the TrainJob's controller has injected; None outside of a TrainJob, or if it is not safe."""
        endpoint_url = variables.get(URL, "")
        if not endpoint_url:
            return None
        url_parts = urlsplit(endpoint_url)
        if url_parts.scheme != "https" and not (
            url_parts.scheme == "http" and url_parts.hostname in _LOOPBACK
        ):
            log.warning(
                "%s=%s is not an https address, so the pod's token is not sent there",
                URL,
                endpoint_url,
            )
            return None
        return cls(
            endpoint_url, variables.get(CA_CERT) or None, variables.get(TOKEN) or None
        )

    # Any: JSON values
    def post_status(self, status: Mapping[str, Any], timeout_s: float) -> None:
        """Post a status; certificate and token are read again each time, because both are rotated.

        Raises: OSError, ValueError or HTTPException for any failure.
        """
        headers = {"Content-Type": "application/json"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {Path(self.token).read_text().strip()}"
        body = json.dumps({"trainerStatus": status}).encode()
        with self._make_opener().open(
            Request(self.url, body, headers, method="POST"), timeout=timeout_s
        ) as response:
            response.read()

    def _make_opener(self) -> OpenerDirector:
        tls_context = ssl.create_default_context(cafile=self.ca_cert)
        return build_opener(
            HTTPSHandler(context=tls_context), ProxyHandler({}), _NoRedirect()
        )


class TrainJobStatus:
    """Reporter of a run's progress: posts at most every five seconds, from a thread, and never raises.

    Ranks: main only.
    """

    def __init__(
        self,
        endpoint: StatusEndpoint,
        share: Callable[[], float | None],
        step: Callable[[], int | None],
        every_s: float = _POST_INTERVAL_S,
    ) -> None:
        """Start the thread; `share` returns the completed share of the run, `step` its updates, or None after its end."""
        self._endpoint = endpoint
        self._share = share
        self._step = step
        self._every_s = every_s
        self._late = LateScalars()
        # replaced as a whole, read by the thread
        self._metrics: Mapping[str, float] = MappingProxyType({})
        self._read_at = 0.0
        self._leader: object = None
        self._bar_share: float | None = None
        self._began: tuple[float, float] | None = None
        self._sent: Mapping[str, Any] = MappingProxyType({})
        self._reachable = True
        self._ended = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=self._post_repeatedly, name="hasten-trainjob", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)

    # -- called by the training thread -----------------------------------------------------------------------------
    # Any: of any type; other than numbers are left out
    def take_metrics(self, values: Mapping[str, Any]) -> None:
        """Take the newest metrics; tensors are read later, without waiting for their device."""
        self._late.store_values(
            {
                str(metric_name): metric_value
                for metric_name, metric_value in values.items()
                if _is_number(metric_value)
            }
        )
        self._read_tensors()

    def take_reading(
        self, key: object, reading: MeterReading, *, closed: bool = False
    ) -> None:
        """Take the reading of a progress bar. The outermost bar gives the share, unless an epoch loop encloses it."""
        if self._leader is None and not closed:
            self._leader = key
        if self._leader is key and reading.total:
            self._bar_share = min(reading.step / reading.total, 1.0)
        if closed and self._leader is key:
            self._leader = None
        self.take_metrics(reading.values)

    def _read_tensors(self) -> None:
        now_s = time.monotonic()
        if now_s - self._read_at >= self._every_s / 2:
            self._read_at = now_s
            latest_numbers = {
                metric_name: metric_value
                for metric_name, metric_value in self._late.read().items()
                if isinstance(metric_value, float | int)
            }
            self._metrics = MappingProxyType(latest_numbers)

    def close(self) -> None:
        """Post the last state and end the thread; a second call does nothing."""
        atexit.unregister(self.close)
        # a forked child has no such thread
        if self._ended.is_set() or os.getpid() != self._pid:
            return
        self._read_at = -math.inf
        self._read_tensors()
        self._ended.set()
        self._thread.join(2 * _TIMEOUT_S)

    # -- the thread ------------------------------------------------------------------------------------------------
    def _post_repeatedly(self) -> None:
        while not self._ended.wait(self._every_s):
            if self._step() is None:  # the Accelerator is gone
                return
            self._post_status(_TIMEOUT_S)
        self._post_status(_LAST_TIMEOUT_S)

    def _post_status(self, timeout_s: float) -> None:
        status = self._make_status()
        if status == self._sent:
            return
        try:
            self._endpoint.post_status(
                {**status, "lastUpdatedTime": _utc_now()}, timeout_s
            )
        # the training does not depend on its display
        except (OSError, ValueError, HTTPException) as error:
            if isinstance(error, HTTPError):
                error.close()  # it is also the answer, with its connection
            if self._reachable:
                log.warning(
                    "the status of this TrainJob cannot be posted to %s: %s",
                    self._endpoint.url,
                    error,
                )
            self._reachable = False
            return
        self._reachable = True
        self._sent = status

    def _make_status(self) -> dict[str, Any]:  # Any: JSON values
        """Return the current status in the field names of the TrainJob; values of metrics are strings."""
        completed_share = self._completed_share()
        num_updates = self._step()
        status: dict[str, Any] = {}
        if completed_share is not None:
            status["progressPercentage"] = math.floor(completed_share * 100)
            if (left_s := self._left_s(completed_share)) is not None:
                status["estimatedRemainingSeconds"] = left_s
        metrics = {
            **({} if num_updates is None else {"step": num_updates}),
            **self._metrics,
        }
        status["metrics"] = [
            {"name": metric_name, "value": f"{metric_value:.8g}"}
            for metric_name, metric_value in [*metrics.items()][:_MAX_METRICS]
        ]
        return status

    def _completed_share(self) -> float | None:
        epoch_share = self._share()
        bar_share = self._bar_share
        return bar_share if epoch_share is None else epoch_share

    def _left_s(self, share: float) -> int | None:
        """Return the remaining seconds at the average speed since the first report, which a resumed run starts midway."""
        now_s = time.monotonic()
        if self._began is None:
            self._began = (now_s, share)
        first_time_s, first_share = self._began
        if share >= 1.0:
            return 0
        if share > first_share:
            return round((now_s - first_time_s) * (1.0 - share) / (share - first_share))
        return None


class TrainJobPart(RunPart):
    """Reports of a run to its TrainJob; none outside of one, and away from the main process."""

    def __init__(self) -> None:
        self.status_reporter: TrainJobStatus | None = None

    # Any: the components of the Accelerator, in an upper layer
    def built(self, run: Any) -> None:
        """Start the thread, which holds the Accelerator weakly."""
        endpoint = None
        if run.accelerator.ctx.rank == 0:
            endpoint = StatusEndpoint.from_env(env.snapshot())
        if endpoint is None:
            return
        clock_ref = weakref.ref(run.clock)
        epochs_ref = weakref.ref(run.epochs)
        self.status_reporter = TrainJobStatus(
            endpoint,
            lambda: None if (loops := epochs_ref()) is None else loops.share(),
            lambda: None if (steps := clock_ref()) is None else steps.num_updates,
        )

    def log(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Report logged values."""
        if self.status_reporter is not None:
            self.status_reporter.take_metrics(values)
        return values

    def progress(self, bar: object, reading: MeterReading, closed: bool) -> None:
        """Report a bar."""
        if self.status_reporter is not None:
            self.status_reporter.take_reading(bar, reading, closed=closed)

    def end(self) -> None:
        """Report the last state."""
        if self.status_reporter is not None:
            self.status_reporter.close()


def _is_number(metric_value: object) -> bool:
    if isinstance(metric_value, Tensor):
        return metric_value.numel() == 1 and not metric_value.is_complex()
    return (
        isinstance(metric_value, float | int)
        and not isinstance(metric_value, bool)
        and math.isfinite(metric_value)
    )


def _utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
