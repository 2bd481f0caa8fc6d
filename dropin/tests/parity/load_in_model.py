"""load_checkpoint_in_model reads sharded and single files."""

import json
import tempfile
from pathlib import Path

import torch
from torch import nn

from accelerate import load_checkpoint_in_model


def outputs(model):
    return model(torch.linspace(-1, 1, 6).view(2, 3)).detach()


def run() -> object:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)).eval()
    expected = outputs(model)
    state = model.state_dict()
    half = list(state)[: len(state) // 2]
    equal_outputs = []
    with tempfile.TemporaryDirectory() as folder:
        names_by_file = {
            "a.bin": half,
            "b.bin": [name for name in state if name not in half],
        }
        for file, names in names_by_file.items():
            torch.save({name: state[name] for name in names}, Path(folder) / file)
        index = {
            "weight_map": {
                name: file for file, names in names_by_file.items() for name in names
            }
        }
        (Path(folder) / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        torch.save(state, Path(folder) / "whole.bin")
        for checkpoint in (
            folder,
            str(Path(folder) / "whole.bin"),
            str(Path(folder) / "pytorch_model.bin.index.json"),
        ):
            fresh = nn.Sequential(
                nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)
            ).eval()
            load_checkpoint_in_model(fresh, checkpoint)
            equal_outputs.append(bool(torch.equal(outputs(fresh), expected)))
    return equal_outputs


PROCESSES = (1,)
