"""The text format: what is rendered is read back, by the strict parser and by Prometheus's own tool where it is installed."""

from __future__ import annotations

import math
import os
import shutil
import subprocess

import pytest

from hasten.errors import ConfigError
from hasten.metrics.catalogue import RankReading, ReplicaReading, families
from hasten.metrics.exposition import MetricFamily, Sample, parse, render

READING = RankReading(
    facts={"version": "1", "strategy": "ddp", "script": 'tr"ain\\.py'},
    world_size=2,
    uptime_s=12.5,
    step=7,
    updates=8,
    samples=64,
    step_age_s=0.25,
    loss=float("nan"),
    grad_norm=float("inf"),
    tokens_per_second=1e6,
    mfu=0.4,
    memory_bytes={"host": 1 << 30, "device": 1 << 31},
    data_wait=0.1,
    stalls=1,
    restarts=2,
    skipped=3,
    saves=4,
    checkpoint_age_s=60.0,
    checkpoint_s=1.5,
    seconds={"useful": 10.0, "startup": 2.5},
    goodput=0.8,
    replicas=ReplicaReading(present=3, lost=2, joined=1, returned=24, waiting_s=0.5),
)
LABELS = {"job": "a\nb", "rank": "0", "machine": "vm"}


def test_what_is_rendered_is_read_back() -> None:
    text = render(families(READING), LABELS)
    samples = {(one.name, tuple(one.labels.items())): one for one in parse(text)}
    assert len(samples) == sum(len(family.samples) for family in families(READING))
    by_name = {one.name: one for one in samples.values()}
    assert all({**one.labels}.items() >= LABELS.items() for one in samples.values())
    assert by_name["hasten_step"].value == 7
    assert by_name["hasten_info"].labels["script"] == 'tr"ain\\.py'
    assert math.isnan(by_name["hasten_loss"].value)
    assert math.isinf(by_name["hasten_grad_norm"].value)


def test_each_name_has_one_help_one_type_and_its_suffix() -> None:
    lines = render(families(READING), LABELS).splitlines()
    for word in ("HELP", "TYPE"):
        names = [line.split()[2] for line in lines if line.startswith(f"# {word} ")]
        assert len(names) == len(set(names)) == len(families(READING))
    for family in families(READING):
        assert family.name.startswith("hasten_")
        assert (family.kind == "counter") == family.name.endswith("_total")


def test_numbers_that_are_not_known_are_left_out() -> None:
    text = render(families(RankReading(uptime_s=1.0, step=0, updates=0, samples=0, step_age_s=1.0)), LABELS)
    assert "hasten_loss" not in text
    assert "hasten_memory_bytes" not in text


@pytest.mark.parametrize(
    "line",
    [
        "<html>",
        "a{b=c} 1",
        'a{b="c} 1',
        'a{b="c"}1',
        "a one",
        "a",
        "a 1 2 3",
        'a{b="\\x"} 1',
        "1a 2",
    ],
)
def test_lines_of_another_format_are_refused(line: str) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.port"):
        parse(f"ok 1\n{line}\n")


def test_a_sample_that_appears_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="line 2 repeats"):
        parse('a{x="1",y="2"} 1\na{y="2",x="1"} 1\n')


def test_prometheus_accepts_the_text() -> None:
    tool = shutil.which("promtool", path=os.pathsep.join([os.environ.get("PROMETHEUS_BIN", ""), os.environ["PATH"]]))
    if tool is None:
        pytest.skip("promtool is not installed")

    def check(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([tool, "check", "metrics"], input=text, capture_output=True, text=True)

    done = check(render(families(READING), LABELS))
    assert (done.returncode, done.stderr) == (0, "")
    odd = MetricFamily("hasten_wrong", "counter", "Name without its suffix.", [Sample(1.0)])
    assert check(render([odd], LABELS)).returncode != 0, "the tool looks at names"
