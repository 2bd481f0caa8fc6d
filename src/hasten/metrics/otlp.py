"""OTLP over HTTP: metric families as the JSON of OpenTelemetry's protocol, and the thread that posts them."""

from __future__ import annotations

import http.client
import logging
import math
import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import msgspec

from hasten.config.sections.loop import MetricsSettings
from hasten.errors import ConfigError
from hasten.metrics.exposition import MetricFamily, Sample
from hasten.metrics.server import read_token
from hasten.version import __version__

log = logging.getLogger(__name__)

_PATIENCE_S: Final = 5.0
_LAST_S: Final = 2.0
"""Seconds that the end of a training waits for its last values to be posted."""
_CUMULATIVE: Final = 2

# Any in this file: JSON values.


def payload(families: Sequence[MetricFamily], labels: Mapping[str, str], began_s: float, now_s: float) -> bytes:
    """Return the JSON of an ExportMetricsServiceRequest; `labels` become attributes of the resource and of every point."""
    metrics = [_metric(family, labels, began_s, now_s) for family in families if family.samples]
    resource = {
        "service.name": "hasten",
        "host.name": labels.get("machine", ""),
        "service.instance.id": _instance(labels),
    }
    request = {
        "resourceMetrics": [
            {
                "resource": {"attributes": _attributes(resource)},
                "scopeMetrics": [{"scope": {"name": "hasten", "version": __version__}, "metrics": metrics}],
            }
        ]
    }
    return msgspec.json.encode(request)


def _instance(labels: Mapping[str, str]) -> str:
    return f"{labels.get('job', '')}/{labels.get('rank', '')}"


def _metric(family: MetricFamily, labels: Mapping[str, str], began_s: float, now_s: float) -> dict[str, Any]:
    points = [_point(sample, labels, began_s, now_s, family.kind == "counter") for sample in family.samples]
    found: dict[str, Any] = {"name": family.name, "description": family.help, "unit": family.unit}
    if family.kind == "gauge":
        return {**found, "gauge": {"dataPoints": points}}
    return {**found, "sum": {"dataPoints": points, "aggregationTemporality": _CUMULATIVE, "isMonotonic": True}}


def _point(sample: Sample, labels: Mapping[str, str], began_s: float, now_s: float, counts: bool) -> dict[str, Any]:
    value = sample.value
    number: float | str = value
    if not math.isfinite(value):  # as protobuf's JSON spells them
        number = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    start = {"startTimeUnixNano": _nanoseconds(began_s)} if counts else {}
    return {
        "attributes": _attributes({**labels, **sample.labels}),
        **start,
        "timeUnixNano": _nanoseconds(now_s),
        "asDouble": number,
    }


def _nanoseconds(seconds: float) -> str:
    return str(int(seconds * 1e9))


def _attributes(labels: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"key": key, "value": {"stringValue": value}} for key, value in labels.items()]


def address_of(endpoint: str) -> SplitResult:
    """Return the parts of an endpoint; an address without a path gets OTLP's, `/v1/metrics`.

    Raises: ConfigError for what is not an address of HTTP.
    """
    parts = urlsplit(endpoint)
    try:
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is not a number
        usable = False
    if not usable or parts.username is not None:
        raise ConfigError(
            f"metrics.otlp_endpoint={endpoint!r} is not an address of OTLP over HTTP, so no metrics could be sent; give the collector's, such as "
            "http://127.0.0.1:4318, and credentials in metrics.otlp_token_file."
        )
    return parts if parts.path not in ("", "/") else parts._replace(path="/v1/metrics")


class OtlpPusher:
    """Thread that posts the metrics of one rank at an interval, from `start` to `close`. A failing collector is logged once."""

    def __init__(
        self, settings: MetricsSettings, labels: Mapping[str, str], read: Callable[[], Sequence[MetricFamily]]
    ) -> None:
        assert settings.otlp_endpoint is not None, "made only with an endpoint"
        self._address = address_of(settings.otlp_endpoint)
        self._every_s = settings.otlp_every_s
        self._headers = {"Content-Type": "application/json", "User-Agent": f"hasten/{__version__}"}
        if settings.otlp_token_file is not None:
            token = read_token(settings.otlp_token_file, "metrics.otlp_token_file")
            self._headers["Authorization"] = f"Bearer {token}"
        self._tls = _client_tls(settings.otlp_ca) if self._address.scheme == "https" else None
        self._labels, self._read = labels, read
        self._began_s = time.time()
        self._over = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="hasten-otlp", daemon=True)
        self.failure = ""
        """Error of the latest post; empty if it succeeded."""

    def start(self) -> None:
        """Start posting."""
        self._thread.start()

    def close(self) -> None:
        """Post the last values, for two seconds at most, and stop."""
        if os.getpid() != self._pid or self._over.is_set():
            return
        self._over.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_LAST_S)

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self.post(_PATIENCE_S)
        self.post(_LAST_S)

    def post(self, patience_s: float) -> None:
        """Post the current values; failures are logged, the first of a row as a warning."""
        try:
            body = payload(self._read(), self._labels, self._began_s, time.time())
            found = self._send(body, patience_s)
        except Exception as error:  # of any kind: a collector must not affect the training
            found = f"{type(error).__name__}: {error}"
        if found and not self.failure:
            log.warning(
                "metrics could not be sent to %s (%s), so that this collector has no values of now; the training is not affected. They are "
                "sent again every %g s; check metrics.otlp_endpoint.",
                self._address.netloc,
                found,
                self._every_s,
            )
        self.failure = found

    def _send(self, body: bytes, patience_s: float) -> str:
        host, port = self._address.hostname or "", self._address.port
        if self._tls is not None:
            link: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=patience_s, context=self._tls
            )
        else:
            link = http.client.HTTPConnection(host, port, timeout=patience_s)
        try:
            query = f"?{self._address.query}" if self._address.query else ""
            link.request("POST", self._address.path + query, body, self._headers)
            answer = link.getresponse()
            answer.read(1 << 16)
            return "" if 200 <= answer.status < 300 else f"HTTP {answer.status} {answer.reason}"
        finally:
            link.close()


def _client_tls(ca: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"metrics.otlp_ca={ca!r} cannot be loaded ({error}), so the collector could not be verified; give a PEM file of certificates."
        ) from error
