"""A vision loop for a notebook: a frozen backbone, OneCycleLR, gathered predictions, started by notebook_launcher."""

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, notebook_launcher
from accelerate.utils import set_seed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.backbone(x).flatten(1))


def get_dataloaders(batch_size=8):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (52,), generator=generator)
    images = torch.randn(52, 3, 8, 8, generator=generator) + labels[:, None, None, None]
    train, valid = TensorDataset(images[:36], labels[:36]), TensorDataset(images[36:], labels[36:])
    return DataLoader(train, shuffle=True, batch_size=batch_size, drop_last=True), DataLoader(
        valid, batch_size=2 * batch_size
    )


def training_loop(mixed_precision="no", seed=42, batch_size=8):
    set_seed(seed)
    accelerator = Accelerator(mixed_precision=mixed_precision)
    train_dataloader, eval_dataloader = get_dataloaders(batch_size)
    model = Net()
    for param in model.backbone.parameters():
        param.requires_grad = False
    mean = torch.zeros(1, 3, 1, 1, device=accelerator.device)
    optimizer = torch.optim.Adam(params=model.head.parameters(), lr=0.05)
    lr_scheduler = OneCycleLR(optimizer, max_lr=0.05, epochs=3, steps_per_epoch=len(train_dataloader))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    for _epoch in range(3):
        model.train()
        for image, label in train_dataloader:
            outputs = model(image - mean)
            loss = nn.functional.cross_entropy(outputs, label)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        accurate, num_elems = 0, 0
        for image, label in eval_dataloader:
            with torch.no_grad():
                outputs = model(image - mean)
            predictions = outputs.argmax(dim=-1)
            accurate_preds = accelerator.gather(predictions) == accelerator.gather(label)
            num_elems += accurate_preds.shape[0]
            accurate += accurate_preds.long().sum()
        accelerator.print(f"accuracy {100 * accurate.item() / num_elems:.2f}")
    return accelerator.num_processes


if __name__ == "__main__":
    notebook_launcher(training_loop, ("no", 42, 8), num_processes=2)
    print("done")
