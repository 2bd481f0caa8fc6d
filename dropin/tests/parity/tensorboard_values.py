"""What TensorBoard's files hold: numbers, texts and dicts of numbers; nothing of what cannot be plotted."""

import tempfile
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from accelerate import Accelerator

VALUES = (
    {"ema": None},
    {"list": [1, 2]},
    {"tensor": torch.arange(3.0)},
    {"text": "words"},
    {"parts": {"a": 1.0, "b": 2}},
)


def read(file):
    events = EventAccumulator(str(file))
    events.Reload()
    tags = events.Tags()
    return [
        {
            tag: [[event.step, event.value] for event in events.Scalars(tag)]
            for tag in tags["scalars"]
        },
        tags["tensors"],
    ]


def run() -> object:
    folder = Path(tempfile.mkdtemp())
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=folder)
    accelerator.init_trackers("run", {"lr": 0.1, "name": "x", "flag": True})
    for step, values in enumerate(VALUES):
        accelerator.log(values, step=step)
    accelerator.log({"loss": torch.tensor(2.5), "done": True}, step=9)
    accelerator.end_training()
    values_by_file = {}
    for file in sorted(folder.rglob("*tfevents*")):
        run_folder = str(file.parent.relative_to(folder))
        values_by_file[
            "run/TIME" if any(map(str.isdigit, run_folder)) else run_folder
        ] = read(file)
    return [values_by_file, [file.read_text() for file in folder.rglob("hparams.yml")]]


PROCESSES = (1,)
