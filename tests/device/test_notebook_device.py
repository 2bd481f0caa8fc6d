"""Launching where an accelerator is present: it is counted, and a notebook that already uses it can still train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hasten.cli.main import main
from hasten.launch.base import describe_host
from hasten.launch.notebook import notebook_launcher

pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings file but the test's."""
    monkeypatch.setenv("HASTEN_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def test_devices_are_counted_as_torch_counts_them() -> None:
    host = describe_host()
    assert host.device == "cuda"
    assert host.num_devices == torch.accelerator.device_count()


def test_a_notebook_that_uses_the_device_can_launch() -> None:
    assert float(torch.ones(3, device="cuda").sum()) == 3.0  # CUDA is initialised here

    def work(x: float) -> tuple[str, float]:
        import torch

        from hasten import Accelerator

        accelerator = Accelerator()
        total = accelerator.reduce(torch.full((1,), x, device=accelerator.device))
        return accelerator.config.mixed_precision, float(total)

    assert notebook_launcher(work, (2.5,), num_processes=1, mixed_precision="bf16") == (
        "bf16",
        2.5,
    )


def test_the_self_check_passes_on_the_device(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["test", "--mixed_precision", "bf16"]) == 0
    assert "1 on cuda" in capfd.readouterr().out
