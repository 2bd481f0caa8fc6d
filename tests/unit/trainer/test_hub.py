"""push_to_hub against a server of our own that speaks the Hub's protocol: the model arrives whole, without checkpoints."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import load

from tests.support.toys import Scored

pytest.importorskip("huggingface_hub")
HERE: Final = Path(__file__).parent
SCRIPT: Final = """
import sys
import torch
from hasten import Trainer, TrainingArguments
from hasten.testing.toys import seeded
from tests.support.toys import Rows, Scored

args = TrainingArguments(
    sys.argv[1], max_steps=4, save_steps=2, push_to_hub=True, hub_model_id="someone/tiny", hub_token="hf_secret",
    hub_strategy=sys.argv[2], hub_private_repo=True, disable_tqdm=True,
)
trainer = Trainer(seeded(Scored), args, train_dataset=Rows())
trainer.train()
torch.save(trainer.model.state_dict(), sys.argv[1] + "/expected.pt")
"""


@pytest.mark.parametrize("strategy", ["every_save"])
def test_the_model_arrives(tmp_path: Path, strategy: str) -> None:
    spec = importlib.util.spec_from_file_location("hub_server", HERE / "hub_server.py")
    assert spec is not None
    assert spec.loader is not None
    server = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(server)
    with server.serving() as (hub, address):
        env = {
            **os.environ,
            "HF_ENDPOINT": address,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HOME": str(tmp_path),
        }
        out = tmp_path / "out"
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(out), strategy], env=env, capture_output=True, text=True, timeout=100, check=False
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stderr[-3000:]}\n{hub.refused}"
    files = hub.files["someone/tiny"]
    assert set(files) == {"model.safetensors", "training_args.json"}
    assert b"hf_secret" not in b"".join(files.values())
    assert hub.tokens - {""} == {"Bearer hf_secret"}  # addresses of large files are signed and carry none
    assert hub.private == {"someone/tiny": True}
    sent, expected = load(files["model.safetensors"]), torch.load(out / "expected.pt")
    assert set(sent) == set(Scored().state_dict())
    assert all(torch.equal(sent[name], expected[name]) for name in sent)
    progress = [f"Training in progress, step {step}" for step in (2, 4)] if strategy == "every_save" else []
    assert hub.messages == [*progress, "End of training"]
