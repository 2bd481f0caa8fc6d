"""The Trainer's push_to_hub with the real client over HTTP: model and card arrive, without checkpoints and without the token."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import load

from hasten import TrainingArguments
from tests.support.hub_server import TOKEN, environment, serving
from tests.support.toys import Scored

hub_client = pytest.importorskip("huggingface_hub")
SCRIPT: Final = """
import sys
import torch
from hasten import Trainer, TrainingArguments
from hasten.testing.toys import seeded
from tests.support.toys import Rows, Scored

args = TrainingArguments(
    sys.argv[1], max_steps=4, save_steps=2, push_to_hub=True, hub_model_id="someone/tiny", hub_token=sys.argv[3],
    hub_strategy=sys.argv[2], hub_private_repo=True, disable_tqdm=True, logging_steps=1, learning_rate=0.0125,
)
print(args)
trainer = Trainer(seeded(Scored), args, train_dataset=Rows())
trainer.train()
torch.save(trainer.model.state_dict(), sys.argv[1] + "/expected.pt")
"""


@pytest.mark.parametrize("strategy", ["every_save"])
def test_the_model_arrives(tmp_path: Path, strategy: str) -> None:
    out = tmp_path / "out"
    with serving() as hub:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(out), strategy, TOKEN],
            env={**os.environ, **environment(hub.address, str(tmp_path / "home"))},
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{hub.unknown}"
    assert not hub.unknown
    files = hub.files("someone/tiny")
    assert set(files) == {
        "model.safetensors",
        "training_args.json",
        "README.md",
        ".gitattributes",
    }
    # addresses of large files are signed and carry none
    assert hub.tokens - {""} == {f"Bearer {TOKEN}"}
    assert hub.repositories["someone/tiny"].private
    sent, expected = load(files["model.safetensors"]), torch.load(out / "expected.pt")
    assert set(sent) == set(Scored().state_dict())
    assert all(torch.equal(sent[name], expected[name]) for name in sent)
    progress = (
        [f"Training in progress, step {step}" for step in (2, 4)]
        if strategy == "every_save"
        else []
    )
    assert hub.messages("someone/tiny") == [*progress, "End of training"]
    card = hub_client.ModelCard(files["README.md"].decode())
    assert card.data.tags == ["hasten"]
    assert "| learning_rate | 0.0125 |" in card.text
    assert "| step | 4 |" in card.text
    assert card.text.count("\n| 4 |") == 1, "the losses of step 4, in one row"
    assert TOKEN not in done.stdout + done.stderr
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in kept if TOKEN.encode() in path.read_bytes()]
    assert not list(out.glob(".hasten-hub-*")), (
        "copies for background uploads are deleted"
    )
    assert TOKEN.encode() not in b"".join(files.values())


def _run(folder: Path, address: str, token: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder / "out"), "every_save", token],
        env={**os.environ, **environment(address, str(folder / "home"))},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_a_failed_upload_ends_the_run_only_at_its_end(tmp_path: Path) -> None:
    with serving() as hub:
        hub.refuse_after = 0
        done = _run(tmp_path, hub.address, TOKEN)
    assert done.returncode == 1
    assert "The next push sends the model of that time." in done.stderr
    assert "HubError" in done.stderr.splitlines()[-1]
    checkpoints = sorted(
        path.name for path in (tmp_path / "out" / "checkpoints").iterdir()
    )
    assert checkpoints == ["checkpoint_0", "checkpoint_1"], (
        "the training went on after the first failure"
    )
    metrics = next((tmp_path / "out" / "trainer").rglob("metrics.jsonl")).read_text(
        "utf-8"
    )
    assert '"finished"' in metrics.splitlines()[-1], "trackers are closed"


def test_a_later_push_makes_up_for_a_failed_one(tmp_path: Path) -> None:
    with serving() as hub:
        hub.refused = {1}
        done = _run(tmp_path, hub.address, TOKEN)
    assert done.returncode == 0, done.stderr[-3000:]
    assert hub.messages("someone/tiny") == [
        "Training in progress, step 4",
        "End of training",
    ]


def test_a_refused_token_is_found_before_the_training(tmp_path: Path) -> None:
    with serving() as hub:
        done = _run(tmp_path, hub.address, "hf_" + "wrong" * 5)
    assert done.returncode == 1
    assert "Nothing was trained." in done.stderr
    assert "hub_token of TrainingArguments" in done.stderr
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_arguments_do_not_show_the_token() -> None:
    assert "hf_abc" not in repr(
        TrainingArguments("out", push_to_hub=True, hub_token="hf_abc")
    )
