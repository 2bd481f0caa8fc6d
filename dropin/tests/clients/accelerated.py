"""pytorch-accelerated's Trainer: training, evaluation, a checkpoint, going on from it. Usage: accelerated.py FOLDER OUT.json"""

from pathlib import Path

import torch
from outcome import record, weights
from pytorch_accelerated import Trainer
from torch import nn
from torch.utils.data import TensorDataset


def data(seed, length):
    x = torch.randn(length, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))


def trainer():
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)
    )
    return Trainer(
        model,
        loss_func=nn.MSELoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        callbacks=(),
    )


def losses(run):
    return [
        run.run_history.get_metric_values(name)
        for name in ("train_loss_epoch", "eval_loss_epoch")
    ]


def main(folder):
    Path(folder).mkdir(parents=True, exist_ok=True)
    run = trainer()
    run.train(
        train_dataset=data(0, 50), eval_dataset=data(1, 13), num_epochs=3, per_device_batch_size=4,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    path = str(Path(folder) / "checkpoint.pt")
    run.save_checkpoint(path)
    resumed_run = trainer()
    resumed_run.load_checkpoint(path)
    resumed_run.train(
        train_dataset=data(0, 50),
        eval_dataset=data(1, 13),
        num_epochs=1,
        per_device_batch_size=4,
    )
    return {
        "losses": losses(run),
        "after": losses(resumed_run),
        "weights": [
            weights(trained_run.get_model().parameters())
            for trained_run in (run, resumed_run)
        ],
    }


if __name__ == "__main__":
    record(main)
