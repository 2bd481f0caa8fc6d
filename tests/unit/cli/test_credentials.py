"""Credentials of a training reach the trackers that need them, and no file, page or terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hasten.cli.main import main
from hasten.extensions.trainer.arguments import TrainingArguments
from hasten.extensions.trainer.checkpoints import save_model
from hasten.extensions.trainer.trainer import Trainer

SECRETS = (
    "hunter2one",
    "hunter2two",
    "hunter2three",
    "hunter2four",
    "hunter2five",
    "hunter2six",
    "hunter2seven",
    "hunter2eight",
)
TRAINING = """
import sys
import torch
from hasten import Accelerator
from hasten.extending import Tracker

class Service(Tracker):
    name = "service"
    def start(self, run):
        assert run.config["api_key"] == "hunter2one", "a tracker of one's own gets what was given"
        assert run.options == {"password": "hunter2eight"}
        return run.run_id
    def log(self, entry): pass

accelerator = Accelerator(project_dir="run", log_with=["jsonl", "tensorboard", Service()], cpu=True)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=1))
config = {
    "api_key": "hunter2one", "nested": {"password": "hunter2two", "list": [{"token": "hunter2three"}]}, "url": "https://u:hunter2four@host/x",
    "note": "sk-hunter2five0000000", "tokenizer": "bert", "max_tokens": 512, "num_keys": 3, "key_dim": 64, "author": "someone",
}
accelerator.init_trackers("mine", config=config, init_kwargs={"service": {"password": "hunter2eight"}})
for batch in loader:
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss})
try:
    accelerator.load_state("https://u:hunter2seven@nowhere.invalid/x")
except Exception as error:
    print(type(error).__name__)
accelerator.end_training()
"""  # fmt: skip


def assert_clean(text: str, where: str) -> None:
    """Raise AssertionError with the credential that a text holds."""
    for secret in SECRETS:
        assert secret not in text, f"{where} shows {secret}"


def test_no_file_of_a_run_and_no_report_shows_a_credential(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        TRAINING,
        "--api_key",
        "hunter2six",
        "--max_tokens",
        "512",
    ]
    completed = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert completed.returncode == 0, completed.stderr
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.json", "metrics.jsonl"} <= {path.name for path in files}
    for path in files:
        assert_clean(path.read_bytes().decode("latin-1"), str(path))
    (config,) = (
        json.loads(path.read_text()) for path in files if path.name == "config.json"
    )
    assert config["api_key"] == config["nested"]["password"] == "(set, not shown)"
    shown_settings = {
        "tokenizer": "bert",
        "max_tokens": 512,
        "num_keys": 3,
        "key_dim": 64,
        "author": "someone",
    }
    assert {name: config[name] for name in shown_settings} == shown_settings
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "run"), "-o", str(page)]) == 0
    text = page.read_text("utf-8")
    assert_clean(text, "the report")
    assert "--api_key ***" in text
    assert "--max_tokens 512" in text


def test_the_report_of_an_older_run_masks_what_its_files_show(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "run_log").mkdir(parents=True)
    (run / "metrics.jsonl").write_text(
        '{"step": 0, "time": 1.0, "values": {"loss": 1.0}}\n'
    )
    (run / "config.json").write_text(
        json.dumps(
            {"api_key": "hunter2one", "nested": {"password": "hunter2two"}, "lr": 0.1}
        )
    )
    started = {
        "event": "started", "time": 1.0, "rank": 0, "command": "train.py --token hunter2three", "host": "u:hunter2six@host",
        "settings": {"project.logging_dir": ["s3://u:hunter2four@x", "flag"], "x.api_key": ["hunter2five", "flag"]},
    }  # fmt: skip
    failed = {
        "event": "saved: failed",
        "time": 2.0,
        "error": "OSError: https://u:hunter2seven@x",
    }
    (run / "run_log" / "rank0-1.jsonl").write_text(
        json.dumps(started) + "\n" + json.dumps(failed) + "\n"
    )
    page = tmp_path / "report.html"
    assert main(["report", str(run), "-o", str(page)]) == 0
    assert_clean(page.read_text("utf-8"), "the report")
    assert "0.1" in page.read_text("utf-8")


@pytest.mark.parametrize(
    "words",
    [["config", "show"], ["config", "show", "--why"]],
)
def test_config_show_masks(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HASTEN_HOME", str(tmp_path))
    (tmp_path / "config.yaml").write_text(
        "schema: 1\nproject:\n  logging_dir: s3://id:hunter2one@bucket/x\nlaunch:\n  submit_options: {api_key: hunter2two}\n"
    )
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert_clean(shown, " ".join(words))
    assert "***@bucket" in shown


def test_a_dry_run_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HASTEN_HOME", str(tmp_path))
    script = tmp_path / "train.py"
    script.write_text("")
    words = [
        "launch",
        "--dry-run",
        "--cpu",
        "--num_processes",
        "2",
        "--logging_dir",
        "s3://id:hunter2one@bucket/x",
        str(script),
    ]
    assert main([*words, "--api_key", "hunter2two", "--max_tokens", "512"]) == 0
    shown = capsys.readouterr().out
    assert_clean(shown, "the plan")
    assert "--api_key *** --max_tokens 512" in shown.replace("'", "")


def test_saved_arguments_are_masked(tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path / "out"),
        run_name="https://u:hunter2two@host",
        use_cpu=True,
    )
    trainer = Trainer(torch.nn.Linear(2, 1), args)
    save_model(trainer, str(tmp_path / "saved"))
    text = (tmp_path / "saved" / "training_args.json").read_text()
    assert_clean(text, "training_args.json")
    assert json.loads(text)["output_dir"] == str(tmp_path / "out")
