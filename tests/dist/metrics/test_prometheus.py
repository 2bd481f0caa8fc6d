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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hasten import Accelerator
from hasten.metrics.catalogue import RankReading, families
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

DOCS = Path(__file__).parents[3] / "docs"
PLACES = os.pathsep.join([os.environ.get("PROMETHEUS_BIN", ""), os.environ["PATH"]])
SHORT_RULES = (("> 900", "> 2"), ("for: 2m", "for: 1s"), ("> 7200", "> 3600000"))
"""The limits of the repository's rules that the test replaces."""
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus", path=PLACES) is None, reason="prometheus is not installed")  # fmt: skip


def asked(port: int, path: str, **query: str) -> Any:
    """Return the data of an answer of Prometheus's API."""
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.loads(answer.read())["data"]


@contextmanager
def prometheus(folder: Path, targets: list[str], token: str) -> Iterator[int]:
    """Run a Prometheus that scrapes the targets every half second; yields its port."""
    rules = (DOCS / "prometheus" / "hasten.rules.yml").read_text()
    for limit, shorter in SHORT_RULES:
        assert limit in rules
        rules = rules.replace(limit, shorter)
    (folder / "rules.yml").write_text(rules)
    (folder / "targets.json").write_text(json.dumps([{"targets": targets}]))
    (folder / "token").write_text(token)
    (folder / "prometheus.yml").write_text(
        f"""
global: {{scrape_interval: 500ms, evaluation_interval: 500ms}}
rule_files: [{folder}/rules.yml]
scrape_configs:
  - job_name: trainings
    honor_labels: true
    authorization: {{credentials_file: {folder}/token}}
    file_sd_configs: [{{files: [{folder}/targets.json]}}]
"""
    )
    program = shutil.which("prometheus", path=PLACES)
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


def until(port: int, path: str, wanted: str, **query: str) -> str:
    """Return the answer to a query once it matches a pattern."""
    end, text = time.monotonic() + 60, ""
    while time.monotonic() < end:
        try:
            text = json.dumps(asked(port, path, **query))
        except OSError as error:  # it starts
            text = str(error)
        if re.search(wanted, text):
            return text
        time.sleep(0.2)
    raise AssertionError(f"{query or path} did not become {wanted} within 60 s: {text}")


@needs_prometheus
@ranks(2, timeout_s=120)
def test_a_stalled_job_is_alerted(ctx: ProcessContext, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("token-of-the-job")
    accelerator = Accelerator(
        context=ctx, metrics={"port": 0, "job": "nightly", "token_file": str(tmp_path / "secret")}
    )
    assert accelerator._metrics is not None
    assert accelerator._metrics.server is not None
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    targets = accelerator.gather_object([f"127.0.0.1:{accelerator._metrics.server.port}"])

    def step() -> None:
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    if ctx.is_main:
        with prometheus(tmp_path, targets, "token-of-the-job") as port:
            for _ in range(200):  # makes progress until both ranks were scraped
                step()
                time.sleep(0.05)
                try:
                    found = asked(port, "query", query="hasten_step > 0")["result"]
                except OSError:  # it starts
                    found = []
                accelerator.broadcast_object_list([len(found) == 2])
                if len(found) == 2:
                    break
            assert {(one["metric"]["job"], one["metric"]["rank"]) for one in found} == {
                ("nightly", "0"),
                ("nightly", "1"),
            }
            assert all(one["metric"]["machine"] for one in found)
            assert '"firing"' not in json.dumps(asked(port, "alerts"))
            # and now no rank makes a step
            alerts = until(port, "alerts", '"firing"')
            assert '"alertname": "HastenJobStalled"' in alerts
            assert "nightly has made no update" in alerts
            assert asked(port, "query", query="up == 0")["result"] == [], "a stalled rank is scraped all the same"
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
    tool = shutil.which("promtool", path=PLACES)
    if tool is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run([tool, "check", "rules", str(DOCS / "prometheus" / "hasten.rules.yml")], capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_and_the_rules_use_metrics_that_exist() -> None:
    known = {one.name for one in families(RankReading(uptime_s=0.0, step=0, updates=0, samples=0, step_age_s=0.0))}
    rules, board = (
        (DOCS / "prometheus" / "hasten.rules.yml").read_text(),
        (DOCS / "grafana" / "hasten.json").read_text(),
    )
    for text in (rules, board):
        used = set(re.findall(r"\bhasten_[a-z_]+", text))
        assert used
        assert used <= known, used - known
    panels = json.loads(board)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    shown = set(re.findall(r"\bhasten_[a-z_]+", json.dumps([panel["targets"] for panel in panels])))
    assert known - shown <= {"hasten_info", "hasten_uptime_seconds", "hasten_checkpoints_total"}
