"""Reports of progress to a TrainJob: posted to a real HTTPS server, and harmless when there is none."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator
from hasten.extensions.kubernetes.trainjob import StatusEndpoint, TrainJobStatus
from hasten.progress.meter import MeterReading

THREAD: Final = "hasten-trainjob"


class StatusHandler(BaseHTTPRequestHandler):
    """The controller's side of the status endpoint."""

    server: ControllerServer

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        """Take a status."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append(
            (
                time.monotonic(),
                self.headers["Authorization"],
                self.path,
                json.loads(body),
            )
        )
        self.server.pause.wait(self.server.slow_s)
        self.send_response(self.server.code)
        if self.server.code == 302:
            self.send_header("Location", f"{self.server.url}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()


class ControllerServer(ThreadingHTTPServer):
    """A server with a certificate, which keeps what it was sent."""

    daemon_threads = True

    def __init__(self, certificate: Path, key: Path) -> None:
        super().__init__(("127.0.0.1", 0), StatusHandler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.url = f"https://localhost:{self.server_address[1]}"
        self.got: list[tuple[float, str, str, dict[str, Any]]] = []
        self.code, self.slow_s = 200, 0.0
        self.pause = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about clients that refuse the certificate."""

    def wait(self, count: int, seconds: float = 20.0) -> list[dict[str, Any]]:
        """The statuses, once there are so many."""
        deadline = time.monotonic() + seconds
        while len(self.got) < count:
            assert time.monotonic() < deadline, f"{len(self.got)} of {count} statuses"
            time.sleep(0.01)
        return [body["trainerStatus"] for _, _, _, body in self.got]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost, signed by itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    paths = folder / "ca.crt", folder / "key.pem"
    subprocess.run(
        ["openssl", *words.split(), "-out", paths[0], "-keyout", paths[1]],
        check=True,
        capture_output=True,
    )
    return paths


@pytest.fixture
def server(certificate: tuple[Path, Path]) -> Iterator[ControllerServer]:
    """A running controller."""
    with ControllerServer(*certificate) as controller:
        thread = threading.Thread(target=controller.serve_forever)
        thread.start()
        try:
            yield controller
        finally:
            controller.pause.set()
            controller.shutdown()
            thread.join()


@pytest.fixture
def endpoint(
    server: ControllerServer, certificate: tuple[Path, Path], tmp_path: Path
) -> StatusEndpoint:
    """The endpoint as a pod sees it."""
    (tmp_path / "token").write_text("first\n")
    return StatusEndpoint(
        f"{server.url}/status", str(certificate[0]), str(tmp_path / "token")
    )


def variables(endpoint: StatusEndpoint) -> dict[str, str]:
    """The variables that the controller injects."""
    names = {"URL": endpoint.url, "CA_CERT": endpoint.ca_cert, "TOKEN": endpoint.token}
    return {
        f"KUBEFLOW_TRAINER_SERVER_{name}": value
        for name, value in names.items()
        if value
    }


def test_statuses_have_the_fields_of_the_controller_and_are_rate_limited(
    server: ControllerServer, endpoint: StatusEndpoint, tmp_path: Path
) -> None:
    share = [0.0]
    status = TrainJobStatus(
        endpoint, lambda: share[0], lambda: round(share[0] * 40), every_s=0.2
    )
    status.take_metrics(
        {"loss": torch.tensor(0.15), "name": "x", "ok": True, "bad": float("nan")}
    )
    server.wait(1)
    (tmp_path / "token").write_text("second")
    for percent in range(1, 100):
        share[0] = percent / 100
        status.take_metrics({"loss": 1 / percent})
        time.sleep(0.01)
    status.close()
    assert not status._thread.is_alive()
    bodies = server.wait(3)
    times, tokens = (
        [posted_s for posted_s, _, _, _ in server.got],
        [token for _, token, _, _ in server.got],
    )
    # the last one is posted at the end
    assert (
        min(later_s - earlier_s for earlier_s, later_s in pairwise(times[:-1])) > 0.15
    )
    # read again: tokens are rotated
    assert (tokens[0], tokens[-1]) == ("Bearer first", "Bearer second")
    assert bodies[0]["progressPercentage"] == 0
    assert bodies[-1]["progressPercentage"] == 99
    assert bodies[-1]["estimatedRemainingSeconds"] == 0
    assert {m["name"]: m["value"] for m in bodies[-1]["metrics"]} == {
        "step": "40",
        "loss": f"{1 / 99:.8g}",
    }
    assert bodies[-1]["lastUpdatedTime"].endswith("Z")


def test_a_status_fits_the_model_of_kubeflow(
    server: ControllerServer, endpoint: StatusEndpoint
) -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="`make test-kubernetes` installs it"
    )
    status = TrainJobStatus(endpoint, lambda: 0.5, lambda: 3, every_s=0.1)
    server.wait(1)
    status.close()
    body = server.got[0][3]
    model = models.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body)
    assert model.trainer_status.progress_percentage == 50
    assert set(model.to_dict()["trainerStatus"]) == set(body["trainerStatus"])


def test_the_outermost_bar_gives_the_share_without_epoch_loops(
    server: ControllerServer, endpoint: StatusEndpoint
) -> None:
    status = TrainJobStatus(endpoint, lambda: None, lambda: 1, every_s=0.1)
    outer, inner = object(), object()
    status.take_reading(outer, MeterReading(step=1, total=4))
    status.take_reading(inner, MeterReading(step=9, total=10, values={"loss": 2.5}))
    status.take_reading(inner, MeterReading(step=10, total=10), closed=True)
    status.close()
    assert server.wait(1)[-1]["progressPercentage"] == 25


@pytest.mark.parametrize(
    "trouble", ["refused", "error", "untrusted", "no token", "slow", "redirect"]
)
def test_no_trouble_of_the_endpoint_reaches_the_training(
    server: ControllerServer,
    endpoint: StatusEndpoint,
    caplog: pytest.LogCaptureFixture,
    trouble: str,
) -> None:
    match trouble:
        case "refused":
            endpoint = StatusEndpoint(
                "https://localhost:9/status", endpoint.ca_cert, endpoint.token
            )
        case "error" | "redirect":
            server.code = 500 if trouble == "error" else 302
        case "untrusted":
            endpoint = StatusEndpoint(endpoint.url, None, endpoint.token)
        case "no token":
            endpoint = StatusEndpoint(endpoint.url, endpoint.ca_cert, "/no/such/file")
        case "slow":
            server.slow_s = 30.0
    count = [0]
    status = TrainJobStatus(endpoint, lambda: None, lambda: count[0], every_s=0.05)
    start = time.monotonic()
    for count[0] in range(200):
        status.take_metrics({"loss": 1.0})
        time.sleep(0.001)
    assert time.monotonic() - start < 5  # the calls never wait for the server
    server.pause.set()
    status.close()
    assert not status._thread.is_alive()
    if trouble != "slow":
        # said once, not every time
        assert sum("cannot be posted" in text for text in caplog.messages) == 1
    if trouble == "redirect":
        # the token went nowhere else
        assert {path for _, _, path, _ in server.got} == {"/status"}


def test_the_token_is_sent_over_https_only(caplog: pytest.LogCaptureFixture) -> None:
    assert StatusEndpoint.from_env({}) is None
    assert (
        StatusEndpoint.from_env(
            {"KUBEFLOW_TRAINER_SERVER_URL": "http://controller/status"}
        )
        is None
    )
    assert "is not an https address" in caplog.text


def test_a_run_reports_its_epochs_and_ends_its_thread(
    server: ControllerServer, endpoint: StatusEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables(endpoint).items():
        monkeypatch.setenv(name, value)
    accelerator = Accelerator(cpu=True)
    model, data = torch.nn.Linear(1, 1), torch.arange(8.0).reshape(-1, 1)
    loader = DataLoader(TensorDataset(data), batch_size=2)
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), loader
    )
    shares = []
    for _ in accelerator.epochs(2):
        for (x,) in batches:
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": 0.5})
            shares.append(accelerator._epochs.share())
    accelerator.end_training()
    assert shares == [0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0]
    assert server.wait(1)[-1]["progressPercentage"] == 100
    assert {m["name"]: m["value"] for m in server.wait(1)[-1]["metrics"]} == {
        "step": "8",
        "loss": "0.5",
    }
    assert THREAD not in {thread.name for thread in threading.enumerate()}


PREEMPTED: Final = """
import sys, torch
from hasten import PREEMPTED_EXIT_CODE, Accelerator
accelerator = Accelerator(cpu=True)
data = torch.utils.data.DataLoader(torch.arange(8.0).reshape(-1, 1), batch_size=2)
model, loader = accelerator.prepare(torch.nn.Linear(1, 1), data)
for epoch in accelerator.epochs(4):
    for step, x in enumerate(accelerator.progress(loader)):
        accelerator.backward(model(x).mean())
        if (epoch, step) == (1, 1):
            accelerator.log({"loss": torch.tensor(0.25)})
            sys.exit(PREEMPTED_EXIT_CODE)
"""


def test_a_process_that_exits_posts_its_last_state(
    server: ControllerServer, endpoint: StatusEndpoint
) -> None:
    env = {**os.environ, **variables(endpoint)}
    done = subprocess.run(
        [sys.executable, "-c", PREEMPTED],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 85, done.stderr
    last = server.wait(1)[-1]
    # one epoch of four, and two batches of four
    assert last["progressPercentage"] == 37
    assert {"name": "loss", "value": "0.25"} in last["metrics"]
