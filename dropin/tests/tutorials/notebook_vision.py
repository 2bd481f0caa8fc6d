"""Cats and dogs in a notebook: a frozen backbone, OneCycleLR and gathered predictions, started by notebook_launcher."""

import os
import re

import numpy as np
import PIL.Image
import torch
from timm import create_model
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import Compose, RandomResizedCrop, Resize, ToTensor

from accelerate import Accelerator, notebook_launcher
from accelerate.utils import set_seed

data_dir = os.path.join(os.environ["HF_HOME"], "images")
fnames = sorted(name for name in os.listdir(data_dir) if name.endswith(".jpg"))


def extract_label(fname):
    return re.search(r"^(.*)_\d+\.jpg$", fname).groups()[0]


all_labels = sorted({extract_label(name) for name in fnames})
label_to_id = {label: number for number, label in enumerate(all_labels)}


class PetsDataset(Dataset):
    def __init__(self, file_names, image_transform=None):
        self.file_names = file_names
        self.image_transform = image_transform

    def __len__(self):
        return len(self.file_names)

    def __getitem__(self, idx):
        fname = self.file_names[idx]
        image = PIL.Image.open(os.path.join(data_dir, fname)).convert("RGB")
        if self.image_transform is not None:
            image = self.image_transform(image)
        return {"image": image, "label": label_to_id[extract_label(fname)]}


def get_dataloaders(batch_size=8):
    random_perm = np.random.permutation(len(fnames))
    cut = int(0.7 * len(fnames))
    train_tfm = Compose([RandomResizedCrop((16, 16), scale=(0.5, 1.0)), ToTensor()])
    eval_tfm = Compose([Resize((16, 16)), ToTensor()])
    train_dataset = PetsDataset(
        [fnames[i] for i in random_perm[:cut]], image_transform=train_tfm
    )
    eval_dataset = PetsDataset(
        [fnames[i] for i in random_perm[cut:]], image_transform=eval_tfm
    )
    train_dataloader = DataLoader(
        train_dataset,
        shuffle=True,
        batch_size=batch_size,
        drop_last=True,
        num_workers=1,
    )
    eval_dataloader = DataLoader(
        eval_dataset, shuffle=False, batch_size=batch_size * 2, num_workers=1
    )
    return train_dataloader, eval_dataloader


def training_loop(mixed_precision="no", seed=42, batch_size=8):
    set_seed(seed)
    accelerator = Accelerator(mixed_precision=mixed_precision)
    train_dataloader, eval_dataloader = get_dataloaders(batch_size)
    model = create_model("resnet50d", pretrained=True, num_classes=len(label_to_id))
    model = model.to(accelerator.device)
    for param in model.parameters():
        param.requires_grad = False
    for param in model.get_classifier().parameters():
        param.requires_grad = True
    mean = torch.tensor(model.default_cfg["mean"])[None, :, None, None].to(
        accelerator.device
    )
    std = torch.tensor(model.default_cfg["std"])[None, :, None, None].to(
        accelerator.device
    )
    optimizer = torch.optim.Adam(params=model.parameters(), lr=3e-2 / 25)
    lr_scheduler = OneCycleLR(
        optimizer=optimizer,
        max_lr=3e-2,
        epochs=3,
        steps_per_epoch=len(train_dataloader),
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = (
        accelerator.prepare(
            model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
        )
    )
    for epoch in range(3):
        model.train()
        for batch in train_dataloader:
            inputs = (batch["image"] - mean) / std
            outputs = model(inputs)
            loss = torch.nn.functional.cross_entropy(outputs, batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        accurate = 0
        num_elems = 0
        for batch in eval_dataloader:
            inputs = (batch["image"] - mean) / std
            with torch.no_grad():
                outputs = model(inputs)
            predictions = outputs.argmax(dim=-1)
            accurate_preds = accelerator.gather(predictions) == accelerator.gather(
                batch["label"]
            )
            num_elems += accurate_preds.shape[0]
            accurate += accurate_preds.long().sum()
        eval_metric = accurate.item() / num_elems
        accelerator.print(f"epoch {epoch}: {100 * eval_metric:.2f}")
        accelerator.print(
            "loss",
            loss.item(),
            "rate",
            optimizer.param_groups[0]["lr"],
            "of",
            num_elems,
        )


if __name__ == "__main__":
    notebook_launcher(training_loop, ("no", 42, 8), num_processes=2)
