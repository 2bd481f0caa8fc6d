"""Checkpoints with other keys than the model's, in every layout: what is loaded, logged and refused."""

import json
import logging
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import load_checkpoint_in_model


class Log(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def written(folder, layout, state):
    if layout == "torch":
        torch.save(state, folder / "pytorch_model.bin")
        return folder / "pytorch_model.bin"
    if layout == "safetensors":
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return folder / "model.safetensors"
    names = sorted(state)
    keys_by_file = {"one.safetensors": names[:2], "two.safetensors": names[2:]}
    for file, keys in keys_by_file.items():
        save_file(
            {key: state[key] for key in keys}, folder / file, metadata={"format": "pt"}
        )
    index = {
        "weight_map": {key: file for file, keys in keys_by_file.items() for key in keys}
    }
    (folder / "any.index.json").write_text(json.dumps(index))
    return folder / "any.index.json"


def outcome(layout, whole_folder, strict, extra_state, device_map):
    log = logging.getLogger("accelerate.utils.modeling")
    handler = Log()
    log.addHandler(handler)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    state = {
        name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()
    }
    with tempfile.TemporaryDirectory() as text, tempfile.TemporaryDirectory() as away:
        file = written(Path(text), layout, {**state, **extra_state})
        try:
            load_checkpoint_in_model(
                model,
                text if whole_folder else str(file),
                device_map,
                away,
                strict=strict,
            )
        except (RuntimeError, ValueError) as error:
            handler.lines.append(f"{type(error).__name__}: {error}")
        files = (
            sorted(path.name for path in Path(away).iterdir())
            if layout == "torch"
            else None
        )
        lines = [line.replace(text, "FOLDER") for line in handler.lines]
    log.removeHandler(handler)
    return [lines, files, [str(parameter.device) for parameter in model.parameters()]]


def run() -> object:
    outcomes = [
        outcome(layout, whole_folder, strict, extra_state, None)
        for layout in ("torch", "safetensors", "shards")
        for whole_folder in (False, True)
        for strict in (False, True)
        for extra_state in ({}, {"other.weight": torch.ones(1)})
    ]
    outcomes.append(outcome("torch", False, False, {}, {"0": "cpu", "1": "disk"}))
    outcomes.append(outcome("safetensors", False, False, {}, {"0": "cpu", "1": "disk"}))
    outcomes.append(outcome("torch", False, False, {}, {"0": "cpu"}))
    return outcomes


PROCESSES = (1,)
