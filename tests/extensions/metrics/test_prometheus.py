"""A real Prometheus scrapes two ranks: their numbers arrive under their labels, and the alert on a stalled job fires."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hasten import Accelerator
from hasten.extensions.metrics.catalogue import HELP, RankCollector, serve_metrics
from hasten.extensions.metrics.part import metrics_of
from hasten.extensions.metrics.reading import RankReading
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from tests.support.exposition import metrics_text

DOCS = Path(__file__).parents[3] / "docs"
PROMETHEUS_PATH = os.pathsep.join(
    [os.environ.get("PROMETHEUS_BIN", ""), os.environ["PATH"]]
)
SHORT_RULES = (("> 900", "> 2"), ("for: 2m", "for: 1s"), ("> 7200", "> 3600000"))
"""The limits of the repository's rules that the test replaces."""
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus", path=PROMETHEUS_PATH) is None, reason="prometheus is not installed")  # fmt: skip


def asked(port: int, path: str, **query: str) -> Any:
    """Return the data of an answer of Prometheus's API."""
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.loads(answer.read())["data"]


@contextmanager
def prometheus(folder: Path, targets: list[str]) -> Iterator[int]:
    """Run a Prometheus that scrapes the targets every half second; yields its port."""
    rules = (DOCS / "prometheus" / "hasten.rules.yml").read_text()
    for limit, shorter in SHORT_RULES:
        assert limit in rules
        rules = rules.replace(limit, shorter)
    (folder / "rules.yml").write_text(rules)
    (folder / "targets.json").write_text(json.dumps([{"targets": targets}]))
    (folder / "prometheus.yml").write_text(
        f"""
global: {{scrape_interval: 500ms, evaluation_interval: 500ms}}
rule_files: [{folder}/rules.yml]
scrape_configs:
  - job_name: trainings
    honor_labels: true
    file_sd_configs: [{{files: [{folder}/targets.json]}}]
"""
    )
    program = shutil.which("prometheus", path=PROMETHEUS_PATH)
    assert program is not None
    port = 20000 + os.getpid() % 20000
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
        try:
            yield port
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def until(port: int, path: str, pattern: str, **query: str) -> str:
    """Return the answer to a query once it matches a pattern."""
    end, text = time.monotonic() + 60, ""
    while time.monotonic() < end:
        try:
            text = json.dumps(asked(port, path, **query))
        except OSError as error:  # it starts
            text = str(error)
        if re.search(pattern, text):
            return text
        time.sleep(0.2)
    raise AssertionError(
        f"{query or path} did not become {pattern} within 60 s: {text}"
    )


@needs_prometheus
@ranks(2, timeout_s=120)
def test_a_stalled_job_is_alerted(ctx: ProcessContext, tmp_path: Path) -> None:
    accelerator = Accelerator(
        context=ctx,
        metrics={"port": 0, "job": "nightly"},
    )
    metrics = metrics_of(accelerator)
    assert metrics is not None
    assert metrics.server is not None
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    targets = accelerator.gather_object([f"127.0.0.1:{metrics.server.server_port}"])

    def step() -> None:
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    if ctx.is_main:
        with prometheus(tmp_path, targets) as port:
            for _ in range(200):  # makes progress until both ranks were scraped
                step()
                time.sleep(0.05)
                try:
                    series = asked(port, "query", query="hasten_step > 0")["result"]
                except OSError:  # it starts
                    series = []
                accelerator.broadcast_object_list([len(series) == 2])
                if len(series) == 2:
                    break
            assert {
                (sample["metric"]["job"], sample["metric"]["rank"]) for sample in series
            } == {
                ("nightly", "0"),
                ("nightly", "1"),
            }
            assert all(sample["metric"]["machine"] for sample in series)
            assert '"firing"' not in json.dumps(asked(port, "alerts"))
            # and now no rank makes a step
            alerts = until(port, "alerts", '"firing"')
            assert '"alertname": "HastenJobStalled"' in alerts
            assert "nightly has made no update" in alerts
            assert asked(port, "query", query="up == 0")["result"] == [], (
                "a stalled rank is scraped all the same"
            )
    else:
        for _ in range(200):
            step()
            done = [False]
            accelerator.broadcast_object_list(done)
            if done[0]:
                break
    accelerator.wait_for_everyone()
    accelerator.end_training()


@needs_prometheus
def test_prometheus_accepts_the_rules() -> None:
    tool = shutil.which("promtool", path=PROMETHEUS_PATH)
    if tool is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run(
        [tool, "check", "rules", str(DOCS / "prometheus" / "hasten.rules.yml")],
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def full_reading(start_time: float) -> RankReading:
    """Return a reading in which every number is known; counters grow with time."""
    passed = time.monotonic() - start_time
    count = 1 + int(passed * 10)
    return RankReading(
        facts={"version": "1"},
        memory_bytes={"host": 1 << 30, "device": 1 << 32},
        seconds={"useful": passed, "startup": 1.0, "data": passed / 10},
        numbers={
            **{name: count if name.endswith("_total") else 0.5 for name in HELP},
            "hasten_world_size": 2,
            "hasten_step": count,
            "hasten_uptime_seconds": passed,
        },
    )


def labels_of_rank(rank: int) -> dict[str, str]:
    """Return the labels of a rank's samples."""
    return {"job": "nightly", "rank": str(rank), "machine": f"node{rank}"}


@needs_prometheus
def test_every_query_of_the_dashboard_returns_data(tmp_path: Path) -> None:
    """With the variables as Grafana replaces them, each panel's query and each variable's has an answer for both ranks."""
    board, start_time = (
        json.loads((DOCS / "grafana" / "hasten.json").read_text()),
        time.monotonic(),
    )
    variables = {
        "$job": "nightly",
        "$machine": "node0|node1",
        "$__rate_interval": "10s",
        "$__range": "1m",
    }
    servers = [
        serve_metrics(
            "127.0.0.1",
            0,
            RankCollector(partial(full_reading, start_time), labels_of_rank(rank)),
        )
        for rank in range(2)
    ]
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
        targets = [f"127.0.0.1:{server.server_port}" for server in servers]
        port = stack.enter_context(prometheus(tmp_path, targets))
        queries = [
            target["expr"] for panel in board["panels"] for target in panel["targets"]
        ]
        assert len(queries) > 20
        for query in queries:
            plain = query
            for name, value in variables.items():
                plain = plain.replace(name, value)
            assert "$" not in plain, "a variable that the test does not know"
            samples = json.loads(until(port, "query", r'"result": \[\{', query=plain))[
                "result"
            ]
            assert all(sample["value"][1] != "NaN" for sample in samples), plain
            labels = {sample["metric"].get("machine") for sample in samples} - {None}
            assert labels in (set(), {"node0", "node1"}), plain
        # the first one chooses the Prometheus
        for variable in board["templating"]["list"][1:]:
            series, label = re.fullmatch(
                r"label_values\((.*), (\w+)\)", variable["query"]["query"]
            ).groups()  # type: ignore[union-attr]
            label_values = asked(
                port,
                f"label/{label}/values",
                **{"match[]": series.replace("$job", "nightly")},
            )
            assert (
                label_values
                == {"job": ["nightly"], "machine": ["node0", "node1"]}[label]
            )


def test_grafana_knows_every_field_of_the_dashboard() -> None:
    """Against the types that Grafana publishes, which drop fields that they do not know."""
    models = pytest.importorskip(
        "grafana_foundation_sdk.models.dashboard",
        reason="`make test-kubernetes` installs it",
    )
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    board = json.loads((DOCS / "grafana" / "hasten.json").read_text())

    def read_back(dashboard: dict[str, Any]) -> Any:
        return json.loads(
            encoder.JSONEncoder().encode(models.Dashboard.from_json(dashboard))
        )

    assert not [*missing(board, read_back(board))]
    assert [
        *missing({**board, "pannels": []}, read_back({**board, "pannels": []}))
    ] == ["/pannels"]


def missing(expected: Any, actual: Any, path: str = "") -> Iterator[str]:
    """The paths of values that are not the same in `actual`, which may have more."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key, value in expected.items():
            yield from (
                missing(value, actual[key], f"{path}/{key}")
                if key in actual
                else [f"{path}/{key}"]
            )
    elif (
        isinstance(expected, list)
        and isinstance(actual, list)
        and len(expected) == len(actual)
    ):
        for index, (value, actual_value) in enumerate(
            zip(expected, actual, strict=True)
        ):
            yield from missing(value, actual_value, f"{path}[{index}]")
    elif expected != actual:
        yield path


def test_the_dashboard_and_the_rules_use_metrics_that_exist() -> None:
    known_metrics = set(
        re.findall(
            r"^# TYPE (\S+)",
            metrics_text(full_reading(time.monotonic()), labels_of_rank(0)),
            re.MULTILINE,
        )
    )
    rules, board = (
        (DOCS / "prometheus" / "hasten.rules.yml").read_text(),
        (DOCS / "grafana" / "hasten.json").read_text(),
    )
    for text in (rules, board):
        used = set(re.findall(r"\bhasten_[a-z_]+", text))
        assert used
        assert used <= known_metrics, used - known_metrics
    panels = json.loads(board)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    shown = set(
        re.findall(
            r"\bhasten_[a-z_]+", json.dumps([panel["targets"] for panel in panels])
        )
    )
    assert known_metrics - shown <= {
        "hasten_info",
        "hasten_uptime_seconds",
        "hasten_checkpoints_total",
    }
