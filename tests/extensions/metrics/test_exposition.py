"""The metrics of a rank: names, labels and values, and Prometheus's own tool where it is installed."""

from __future__ import annotations

import math
import os
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hasten.extensions.metrics.catalogue import HELP
from hasten.extensions.metrics.reading import RankReading
from tests.support.exposition import metrics_text

READING = RankReading(
    facts={"version": "1", "strategy": "ddp", "script": 'tr"ain\\.py'},
    memory_bytes={"host": 1 << 30, "device": 1 << 31},
    seconds={"useful": 10.0, "startup": 2.5},
    numbers={
        **{name: float(number) for number, name in enumerate(HELP)},
        "hasten_step": 7,
        "hasten_loss": float("nan"),
        "hasten_grad_norm": float("inf"),
        "hasten_samples_returned_total": 24,
    },
)
LABELS = {"job": "a\nb", "rank": "0", "machine": "vm"}


def test_every_number_has_its_name_and_the_labels() -> None:
    families = list(text_string_to_metric_families(metrics_text(READING, LABELS)))
    by_name = {}
    for family in families:
        assert family.name.startswith("hasten_")
        for sample in family.samples:
            assert sample.labels.items() >= LABELS.items()
            assert (family.type == "counter") == sample.name.endswith("_total")
            by_name[sample.name] = sample
    assert len(by_name) == len(families) == 25
    assert by_name["hasten_step"].value == 7
    assert by_name["hasten_info"].labels["script"] == 'tr"ain\\.py'
    assert math.isnan(by_name["hasten_loss"].value)
    assert math.isinf(by_name["hasten_grad_norm"].value)
    assert by_name["hasten_samples_returned_total"].value == 24


def test_numbers_that_are_not_known_are_left_out() -> None:
    reading = RankReading(numbers={**dict.fromkeys(HELP), "hasten_step": 0})
    text = metrics_text(reading, LABELS)
    assert "hasten_step" in text
    assert "hasten_loss" not in text
    assert "hasten_replicas" not in text


def test_prometheus_accepts_the_text() -> None:
    tool = shutil.which(
        "promtool",
        path=os.pathsep.join(
            [os.environ.get("PROMETHEUS_BIN", ""), os.environ["PATH"]]
        ),
    )
    if tool is None:
        pytest.skip("promtool is not installed")

    def check(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tool, "check", "metrics"], input=text, capture_output=True, text=True
        )

    done = check(metrics_text(READING, LABELS))
    assert (done.returncode, done.stderr) == (0, "")
