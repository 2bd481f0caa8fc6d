"""Metrics of a real training: scraped while it runs, by `hasten top --from`, and gone with the Accelerator and the process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch.utils.data import DataLoader

from hasten import Accelerator
from hasten.config.resolve import resolve
from hasten.errors import MissingPackageError, SettingValueError
from hasten.extensions.metrics.part import SampledScalars, metrics_of
from hasten.extensions.metrics.settings import MetricsSettings
from hasten.testing.toys import seeded
from tests.support.toys import Blobs, Classifier


def port_of(accelerator: Accelerator) -> int:
    metrics = metrics_of(accelerator)
    assert metrics is not None
    assert metrics.server is not None
    return metrics.server.server_port


def scraped(accelerator: Accelerator) -> dict[str, float]:
    """The metrics by name; those with a label of their own by name and label."""
    url = f"http://127.0.0.1:{port_of(accelerator)}/metrics"
    with urllib.request.urlopen(url, timeout=5) as answer:
        metrics = list(text_string_to_metric_families(answer.read().decode()))
    common = {"job", "rank", "machine"}
    metrics_by_name = {}
    for metric in metrics:
        for sample in metric.samples:
            own_labels = [
                value for key, value in sample.labels.items() if key not in common
            ]
            metrics_by_name[
                f"{sample.name}/{own_labels[0]}"
                if len(own_labels) == 1
                else sample.name
            ] = sample.value
    return metrics_by_name


def test_metrics_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(
        MissingPackageError, match=r"metrics\.port=0.*hasten\[metrics\]"
    ):
        Accelerator(cpu=True, metrics={"port": 0})


def prepared(accelerator: Accelerator) -> tuple[Any, Any, Any]:
    model: Any = seeded(Classifier)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(Blobs(32), batch_size=4)
    prepared_objects: tuple[Any, Any, Any] = accelerator.prepare(
        model, optimizer, loader
    )
    return prepared_objects


def test_a_training_is_scraped_while_it_runs(tmp_path: Path) -> None:
    accelerator = Accelerator(
        cpu=True, project_dir=str(tmp_path / "mine"), trust="off", metrics={"port": 0}
    )
    model, optimizer, loader = prepared(accelerator)
    for number, (x, y) in enumerate(loader):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss if number else loss * float("nan"))
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        if number == 2:  # inside a step
            scraped_values = scraped(accelerator)
            assert scraped_values["hasten_step"] == 2
        optimizer.step()
        optimizer.zero_grad()
        if number == 0:
            model.load_state_dict(seeded(Classifier).state_dict())
            assert (
                scraped(accelerator)["hasten_loss"]
                != scraped(accelerator)["hasten_loss"]
            ), "nan"
            time.sleep(1.1)
    accelerator.save_state()
    time.sleep(0.1)
    scraped_values = scraped(accelerator)
    assert scraped_values["hasten_step"] == scraped_values["hasten_updates_total"] == 8
    assert scraped_values["hasten_samples_total"] == 32
    assert 0 < scraped_values["hasten_loss"] < 10
    assert norm is not None
    assert scraped_values["hasten_grad_norm"] > 0
    assert scraped_values["hasten_memory_bytes/host"] > 50e6
    assert 0.1 <= scraped_values["hasten_last_step_age_seconds"] < 60
    assert scraped_values["hasten_checkpoints_total"] == 1
    assert 0.1 <= scraped_values["hasten_checkpoint_age_seconds"] < 60
    assert 0 < scraped_values["hasten_checkpoint_duration_seconds"] < 60
    assert scraped_values["hasten_time_seconds/checkpoint"] > 0
    causes = sum(
        value
        for name, value in scraped_values.items()
        if name.startswith("hasten_time_seconds/")
    )
    assert causes == pytest.approx(scraped_values["hasten_uptime_seconds"], abs=0.5)
    assert scraped_values["hasten_goodput_ratio"] == pytest.approx(
        scraped_values["hasten_time_seconds/useful"] / causes, abs=0.01
    )
    accelerator.end_training()


def test_nothing_listens_unless_it_is_asked_for() -> None:
    accelerator = Accelerator(cpu=True)
    assert metrics_of(accelerator) is None
    assert not [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith(("hasten-m", "hasten-o"))
    ]


def test_two_accelerators_in_one_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each has its own numbers; the same port is served by the first, and the other trains without it."""
    first = Accelerator(cpu=True, metrics={"port": 0, "job": "a"})
    second = Accelerator(cpu=True, metrics={"port": 0, "job": "b"})
    third = Accelerator(cpu=True, metrics={"port": port_of(first), "job": "c"})
    assert "the training is not affected" in caplog.text
    for accelerator, updates in ((first, 1), (second, 2), (third, 3)):
        model, optimizer, loader = prepared(accelerator)
        for number, (x, y) in enumerate(loader):
            if number < updates:
                accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    assert [scraped(served)["hasten_step"] for served in (first, second)] == [1, 2]
    metrics = metrics_of(third)
    assert metrics is not None
    assert metrics.read_metrics() is not None
    for accelerator in (first, second, third):
        accelerator.end_training()


def test_an_accelerator_that_is_dropped_leaves_no_thread() -> None:
    accelerator = Accelerator(cpu=True, metrics={"port": 0})
    prepared(accelerator)
    scraped(accelerator)
    gone = weakref.ref(accelerator)
    del accelerator
    gc.collect()
    assert gone() is None
    until = time.monotonic() + 5
    while (
        left := [t for t in threading.enumerate() if t.name == "hasten-metrics"]
    ) and time.monotonic() < until:
        time.sleep(0.02)
    assert not left


def test_settings_that_cannot_be_honoured_are_refused_at_once() -> None:
    with pytest.raises(SettingValueError, match="out of range"):
        Accelerator(cpu=True, metrics={"port": 70000})


def test_flags_and_variables_name_the_port() -> None:
    assert (
        resolve(env={"HASTEN_METRICS_PORT": "9400"})
        .config.section(MetricsSettings)
        .port
        == 9400
    )


@pytest.mark.parametrize("folder", [True, False])
def test_values_are_taken_once_a_second(tmp_path: Path, folder: bool) -> None:
    """An update after the end of a second, or a scrape, has the next loss and norm stored; the others are not looked at."""
    project_dir = str(tmp_path) if folder else None
    accelerator = Accelerator(
        cpu=True, trust="off", metrics={"port": 0}, project_dir=project_dir
    )
    model, optimizer, _ = prepared(accelerator)
    metrics = metrics_of(accelerator)
    assert metrics is not None
    log = metrics._run_log()
    assert log is not None
    known_scalars, due_flags = [], []
    for number in range(1, 7):
        if number == 4:  # the second of the first update has passed
            log._due_s = 0.0
        if number == 6:
            metrics.read_metrics()
        accelerator.backward(
            sum((p * 0).sum() for p in model.parameters()) + float(number)
        )
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        known_scalars.append(metrics.sampled.known)
        due_flags.append((metrics.sampled.loss_due, metrics.sampled.norm_due))
        log._due_s = float("inf")
    assert [scalars["loss"] for scalars in known_scalars] == [1, 2, 2, 2, 5, 6], (
        "the first update of a run has the second stored"
    )
    assert all(scalars["grad_norm"] == 0 for scalars in known_scalars)
    assert due_flags[2:] == [
        (False, False),
        (True, True),
        (False, False),
        (False, False),
    ]
    accelerator.end_training()


def test_only_single_numbers_are_taken() -> None:
    sampled = SampledScalars(torch.device("cpu"))
    sampled.store_value("loss", torch.tensor(1.0))
    assert sampled.known == {"loss": 1.0}
    assert (sampled.loss_due, sampled.norm_due) == (False, True)
    sampled.store_value("grad_norm", torch.tensor([3.0]))
    assert sampled.known == {"loss": 1.0, "grad_norm": 3.0}
    sampled.store_value("loss", torch.tensor([1.0, 2.0]))
    assert sampled.known["loss"] == 1.0
    value = torch.tensor(4.0, requires_grad=True)
    sampled.store_value("loss", value * 1)
    assert sampled.known["loss"] == 4.0


@pytest.mark.exhaustive
def test_a_process_that_ends_or_fails_is_not_held(tmp_path: Path) -> None:
    """The threads end with the interpreter, with a script that never calls end_training and with one that raises."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            from hasten import Accelerator
            from hasten.extensions.metrics.part import metrics_of
            accelerator = Accelerator(cpu=True, metrics={"port": 0})
            print(metrics_of(accelerator).server.server_port, flush=True)
            if sys.argv[1] == "fail":
                raise RuntimeError("on purpose")
            """
        )
    )
    env = {**os.environ, "PYTHONWARNINGS": "default"}
    runs = [
        subprocess.Popen(
            [sys.executable, str(script), ending],
            stdout=-1,
            stderr=-1,
            text=True,
            env=env,
        )
        for ending in ("end", "fail")
    ]
    for run, expected in zip(runs, (0, 1), strict=True):
        _, error = run.communicate(timeout=120)
        assert run.returncode == expected, error
        assert "Fatal Python error" not in error
