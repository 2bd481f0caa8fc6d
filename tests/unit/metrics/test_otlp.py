"""OTLP: a real receiver gets JSON in the protocol's form; one that fails or hangs does not affect the training."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hasten.config.sections.loop import MetricsSettings
from hasten.errors import ConfigError
from hasten.metrics.exposition import MetricFamily, Sample
from hasten.metrics.otlp import OtlpPusher, address_of

FAMILIES = [
    MetricFamily("hasten_step", "gauge", "Steps.", [Sample(7.0)]),
    MetricFamily("hasten_loss", "gauge", "Loss.", [Sample(float("nan"))]),
    MetricFamily("hasten_stalls_total", "counter", "Stalls.", [Sample(2.0)]),
    MetricFamily("hasten_memory_bytes", "gauge", "Memory.", [Sample(5.0, {"kind": "host"})], "By"),
]
LABELS = {"job": "j", "rank": "1", "machine": "m"}


@contextmanager
def receiving(status: int = 200, pause_s: float = 0.0) -> Iterator[tuple[str, list[tuple[str, dict[str, str], Any]]]]:
    """A collector that records the posts; yields its address and the posts."""
    posts: list[tuple[str, dict[str, str], Any]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posts.append((self.path, dict(self.headers), json.loads(body)))
            time.sleep(pause_s)
            self.send_response(status)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", posts
        finally:
            server.shutdown()
            thread.join()


def test_a_receiver_gets_the_protocols_json(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc")
    with receiving() as (address, posts):
        settings = MetricsSettings(otlp_endpoint=address, otlp_every_s=0.1, otlp_token_file=str(tmp_path / "token"))
        pusher = OtlpPusher(settings, LABELS, lambda: FAMILIES)
        pusher.start()
        while len(posts) < 2:
            time.sleep(0.01)
        before = len(posts)
        pusher.close()
        assert len(posts) > before, "the last values are posted"
        assert pusher.failure == ""
    path, headers, body = posts[0]
    assert path == "/v1/metrics"
    assert headers["Content-Type"] == "application/json"
    assert headers["Authorization"] == "Bearer abc"
    (resource,) = body["resourceMetrics"]
    attributes = {one["key"]: one["value"]["stringValue"] for one in resource["resource"]["attributes"]}
    assert attributes == {"service.name": "hasten", "host.name": "m", "service.instance.id": "j/1"}
    (scope,) = resource["scopeMetrics"]
    metrics = {one["name"]: one for one in scope["metrics"]}
    (step,) = metrics["hasten_step"]["gauge"]["dataPoints"]
    assert step["asDouble"] == 7
    assert abs(int(step["timeUnixNano"]) - time.time_ns()) < 60e9
    assert isinstance(step["timeUnixNano"], str), "64-bit integers are text in the protocol's JSON"
    assert metrics["hasten_loss"]["gauge"]["dataPoints"][0]["asDouble"] == "NaN"
    stalls = metrics["hasten_stalls_total"]["sum"]
    assert (stalls["aggregationTemporality"], stalls["isMonotonic"]) == (2, True)
    assert int(stalls["dataPoints"][0]["startTimeUnixNano"]) <= int(stalls["dataPoints"][0]["timeUnixNano"])
    (memory,) = metrics["hasten_memory_bytes"]["gauge"]["dataPoints"]
    assert {one["key"]: one["value"]["stringValue"] for one in memory["attributes"]} == {**LABELS, "kind": "host"}
    assert metrics["hasten_memory_bytes"]["unit"] == "By"


def test_a_failing_collector_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with receiving(status=503) as (address, posts), caplog.at_level(logging.WARNING):
        pusher = OtlpPusher(MetricsSettings(otlp_endpoint=address, otlp_every_s=0.1), LABELS, lambda: FAMILIES)
        pusher.start()
        while len(posts) < 3:
            time.sleep(0.01)
        pusher.close()
        assert "HTTP 503" in pusher.failure
    (record,) = caplog.records
    assert "the training is not affected" in record.getMessage()


def test_the_end_waits_two_seconds_at_most_for_a_collector_that_hangs() -> None:
    with receiving(pause_s=4.0) as (address, _):
        pusher = OtlpPusher(MetricsSettings(otlp_endpoint=address, otlp_every_s=60.0), LABELS, lambda: FAMILIES)
        pusher.start()
        began = time.monotonic()
        pusher.close()
        assert time.monotonic() - began < 3.5
        pusher._thread.join()


@pytest.mark.parametrize("text", ["", "collector:4318", "grpc://a:1", "http://", "http://a:x", "https://u:p@a:1"])
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"such as http://127\.0\.0\.1:4318"):
        address_of(text)


def test_a_path_is_kept() -> None:
    assert address_of("https://a:1/otlp/v1/metrics?x=y").path == "/otlp/v1/metrics"
    assert address_of("http://a:1/").path == "/v1/metrics"
