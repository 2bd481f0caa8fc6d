"""Trackers: TensorBoard by name, one of one's own, settings and values logged from the main process."""

import glob
import json
import os

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import set_seed


class FileTracker(GeneralTracker):
    name = "file"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, run_name):
        super().__init__()
        self.path = run_name + ".jsonl"
        self.run = open(self.path, "w")  # noqa: SIM115

    @property
    def tracker(self):
        return self.run

    @on_main_process
    def store_init_configuration(self, values):
        self.run.write(json.dumps({"config": values}) + "\n")

    @on_main_process
    def log(self, values, step=None):
        self.run.write(json.dumps({"step": step, **values}) + "\n")

    @on_main_process
    def finish(self):
        self.run.close()


def main():
    set_seed(5)
    accelerator = Accelerator(
        log_with=["tensorboard", FileTracker("mine")], project_dir="logs"
    )
    settings = {"num_iterations": 5, "learning_rate": 1e-2, "loss_function": "mse"}
    accelerator.init_trackers("example_project", config=settings)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["learning_rate"])
    x = torch.randn(24, 3)
    dataloader = DataLoader(
        TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True
    )
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
    for step, (inputs, targets) in enumerate(dataloader):
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"training_loss": loss.item()}, step=step)
    if accelerator.is_main_process:
        pictures = torch.linspace(0, 1, 2 * 4 * 4 * 3).view(2, 4, 4, 3).numpy()
        accelerator.get_tracker("tensorboard").log_images(
            {"pictures": pictures}, step=1, dataformats="NHWC"
        )
    accelerator.print(
        "writer", type(accelerator.get_tracker("tensorboard", unwrap=True)).__name__
    )
    if accelerator.is_main_process:
        accelerator.get_tracker("file").log({"note": 1.0}, step=99)
    accelerator.end_training()

    if accelerator.is_main_process:
        print(open("mine.jsonl").read())  # noqa: SIM115
        for events in sorted(glob.glob("logs/**/events.*", recursive=True)):
            accumulator = EventAccumulator(os.path.dirname(events)).Reload()
            for tag in accumulator.Tags()["images"]:
                print(
                    tag,
                    [
                        (event.step, event.width, event.height)
                        for event in accumulator.Images(tag)
                    ],
                )
            for tag in accumulator.Tags()["scalars"]:
                if tag == "training_loss":
                    print(
                        tag,
                        [
                            (event.step, round(event.value, 5))
                            for event in accumulator.Scalars(tag)
                        ],
                    )


if __name__ == "__main__":
    main()
