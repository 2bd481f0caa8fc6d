"""`hasten config default | show | check | path` and write_basic_config, in a home of their own."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import hasten
from hasten.cli.main import main
from hasten.config import files, handoff
from hasten.config.resolve import resolve
from hasten.extensions.setup.config_command import basic_config
from hasten.extensions.setup.machine import (
    MachineFacts,
    cluster_of,
    examine_machine,
    parse_devices,
    recommended_precision,
)

H200 = MachineFacts(
    device="cuda",
    num_devices=8,
    device_name="NVIDIA H200",
    capability=9.0,
    memory_bytes=150 << 30,
)
V100 = MachineFacts(
    device="cuda", num_devices=1, device_name="Tesla V100", capability=7.0
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without settings, seen by the command."""
    monkeypatch.setenv("HASTEN_HOME", str(tmp_path / "ours"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HASTEN_CONFIG", raising=False)
    return tmp_path


def test_default_writes_once(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "default", "--gradient_accumulation_steps", "4"]) == 0
    path = home / "ours" / "config.yaml"
    config = resolve(file=files.read(path).entries).config
    assert config.gradient_accumulation.num_steps == 4
    assert config.cpu == (examine_machine().device == "cpu")
    assert f"Written to {path}" in capsys.readouterr().out
    assert main(["config", "default"]) == 2
    assert "already exists; pass --force" in capsys.readouterr().err
    assert main(["config", "default", "--force"]) == 0
    assert (
        resolve(file=files.read(path).entries).config.gradient_accumulation.num_steps
        == 1
    )


def test_path_says_which_file_holds(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "path"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{home / 'ours' / 'config.yaml'}\n"
    assert "no file yet" in shown.err
    accelerate_file = home / "hf" / "accelerate" / "default_config.yaml"
    accelerate_file.parent.mkdir(parents=True)
    accelerate_file.write_text("distributed_type: 'NO'\nuse_cpu: true\n")
    assert main(["config", "path"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{accelerate_file}\n"
    assert "Hugging Face Accelerate's file" in shown.err


def test_show_why(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = home / "c.yaml"
    path.write_text("mixed_precision: fp16\nlaunch:\n  num_processes: 2\n")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    argv = [
        "config",
        "show",
        "--why",
        "--config_file",
        str(path),
        "--mixed-precision",
        "bf16",
    ]
    assert main(argv) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert (
        f"mixed_precision bf16 flag --mixed-precision, instead of no (environment ACCELERATE_MIXED_PRECISION), fp16 ({path}:1)"
    ) in " ".join(out.split())
    assert ["launch.num_processes", "2", f"{path}:3"] in lines
    assert len(lines) == 2


def test_show_is_a_file_again(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / "hf" / "accelerate" / "default_config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(
        "use_fsdp: true\nfsdp_config: {fsdp_sharding_strategy: 2}\nnum_processes: 2\n"
    )
    assert main(["config", "show"]) == 0
    shown = capsys.readouterr()
    (home / "again.yaml").write_text(shown.out)
    assert (
        "note: fsdp_config.fsdp_sharding_strategy SHARD_GRAD_OP is FSDP2's reshard_after_forward: false"
        in shown.err
    )
    shown_config = resolve(file=files.read(home / "again.yaml").entries).config
    assert shown_config == resolve(file=files.read(path).entries).config


def test_show_inside_a_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched = resolve(code={"mixed_precision": "bf16"})
    monkeypatch.setenv(handoff.VARIABLE, handoff.pack_settings(launched.entries))
    assert main(["config", "show", "--why"]) == 0
    assert "code argument mixed_precision" in capsys.readouterr().out


def test_check(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = home / "good.yaml", home / "bad.yaml"
    good.write_text("mixed_precision: bf16\n")
    bad.write_text("mixed_precision: bf61\nlaunhc: {}\n")
    assert main(["config", "check", str(good)]) == 0
    assert capsys.readouterr().out == f"{good}: valid (ours, 1 settings)\n"
    assert main(["config", "check", str(bad)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("hasten config: 2 settings are wrong:")
    assert f"{bad}:2: unknown setting 'launhc'" in message
    assert main(["config", "check", str(home / "none.yaml")]) == 2
    assert main(["config", "check"]) == 2
    assert "FILE" in capsys.readouterr().err


def test_unknown_config_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "chck"]) == 2
    assert "did you mean `hasten config check`?" in capsys.readouterr().err
    assert main(["config", "--help"]) == 0


def test_wizard_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 2
    assert "needs an interactive terminal" in capsys.readouterr().err


def test_write_basic_config(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = hasten.write_basic_config(mixed_precision="bf16")
    assert path == home / "ours" / "config.yaml"
    assert resolve(file=files.read(path).entries).config.mixed_precision == "bf16"
    with caplog.at_level(logging.WARNING):
        assert hasten.write_basic_config() is False
    assert "exists and was not changed" in caplog.text
    assert (
        hasten.write_basic_config(save_location=home / "other.yaml")
        == home / "other.yaml"
    )


def test_basic_config_suits_the_machine() -> None:
    assert basic_config(H200).mixed_precision == "bf16"
    assert basic_config(H200).strategy == "ddp"
    assert basic_config(H200).launch.multi_gpu
    assert basic_config(V100).mixed_precision == "fp16"
    assert basic_config(V100).strategy == "auto"
    assert basic_config(MachineFacts(device="tpu", num_devices=8)).strategy == "xla"
    assert basic_config(MachineFacts()).cpu
    assert recommended_precision(MachineFacts(device="rocm"))[0] == "bf16"
    assert recommended_precision(MachineFacts(device="mps"))[0] == "no"


def test_machine_in_words() -> None:
    assert H200.words == "8 x NVIDIA H200, 150 GiB each; 1 cores, 0 GiB host memory"
    assert "no accelerator" in MachineFacts().words
    assert examine_machine().cores >= 1
    assert cluster_of({"SLURM_JOB_ID": "1"}) == "SLURM"
    assert cluster_of({}) == ""


def test_what_the_driver_prints_is_understood() -> None:
    assert parse_devices(["143771, 9.0", " 81559, 8.0 "]) == (81559 << 20, 8.0)
    assert parse_devices(["No devices were found"]) == (0, 0.0)
