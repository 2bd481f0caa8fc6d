"""Takes the picture of `hasten report`: a training on two processes, one of which is killed after 150 updates.

    python docs/screens/report.py            # writes docs/pictures/report.png, with Chromium

The launcher restarts the job, and the Trainer goes on from its newest checkpoint.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).parents[1] / "pictures" / "report.png"


def train(folder: str) -> None:
    """One process of the training."""
    import torch
    from torch import nn

    from hasten import Trainer, TrainerCallback, TrainingArguments

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(16, 256),
                nn.GELU(),
                nn.Linear(256, 256),
                nn.GELU(),
                nn.Linear(256, 4),
            )

        def forward(
            self, x: torch.Tensor, labels: torch.Tensor
        ) -> dict[str, torch.Tensor]:
            logits = self.layers(x)
            return {
                "loss": nn.functional.cross_entropy(logits, labels),
                "logits": logits,
            }

    class KilledOnce(TrainerCallback):
        def on_step_end(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            if state.global_step == 150 and os.environ["RANK"] == "1" and first:
                os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    x = torch.randn(6400, 16)
    labels = (x[:, :4] + 0.3 * torch.randn(6400, 4)).argmax(1)
    rows = [{"x": row, "labels": label} for row, label in zip(x, labels, strict=True)]
    args = TrainingArguments(
        folder, num_train_epochs=2, per_device_train_batch_size=16, learning_rate=1e-3, logging_steps=2, save_strategy="steps",
        save_steps=50, eval_strategy="steps", eval_steps=100, disable_tqdm=True, warmup_steps=40,
    )  # fmt: skip
    trainer = Trainer(
        Net(),
        args,
        train_dataset=rows,
        eval_dataset=rows[:640],
        callbacks=[KilledOnce()],
    )
    trainer.train(resume_from_checkpoint="auto")


def main() -> None:
    """Train, write the report and photograph it."""
    if "RANK" in os.environ:
        train(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as place:
        run, page, shot = (
            Path(place) / "run",
            Path(place) / "report.html",
            Path(place) / "shot.png",
        )
        hasten = [sys.executable, "-m", "hasten"]
        launch = [
            *hasten,
            "launch",
            "--cpu",
            "--num_processes",
            "2",
            "--max_restarts",
            "1",
            __file__,
            str(run),
        ]
        subprocess.run(launch, check=True)
        subprocess.run([*hasten, "report", str(run), "-o", str(page)], check=True)
        browser = shutil.which("chromium") or sys.exit("no Chromium on this machine")
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1400,1900", "--virtual-time-budget=8000",
             f"--screenshot={shot}", page.as_uri()],
            check=True,
        )  # fmt: skip
        shutil.copyfile(shot, PICTURE)


if __name__ == "__main__":
    main()
