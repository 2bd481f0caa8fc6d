"""Loaders of torchdata made by hand or by prepare: their states at every batch, and what they read after one."""

import json
import re

import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader
from accelerate.utils import DataLoaderConfiguration


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def plain(value):
    if isinstance(value, dict):  # without a draw of the workers' seed, in one line
        return re.sub(
            r'"_base_seed": \d+', "", json.dumps(value, sort_keys=True, default=repr)
        )
    return str(value.tolist())


def followed(make):
    loader = make()
    observations = [
        [
            isinstance(loader, StatefulDataLoader),
            type(loader.base_dataloader).__name__,
            plain(loader.state_dict()),
        ]
    ]
    for batch in loader:
        observations.append([plain(batch), plain(loader.state_dict())])
        if len(observations) == 3:
            state = loader.state_dict()
    observations.append(plain(loader.state_dict()))
    resumed_loader = make()
    resumed_loader.load_state_dict(state)
    return [
        *observations,
        [plain(batch) for batch in resumed_loader],
        [plain(batch) for batch in resumed_loader],
        plain(resumed_loader.state_dict()),
    ]


def run() -> object:
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
    )
    states_by_loader = {}
    for workers in (0, 2):
        for data in (list(range(10)), Stream()):
            options = {"batch_size": 2, "num_workers": workers}
            where = f"{type(data).__name__} {workers}"
            for kind in (DataLoaderShard, DataLoaderDispatcher, SkipDataLoader):
                torch.manual_seed(0)
                states_by_loader[f"{kind.__name__} {where}"] = followed(
                    lambda kind=kind, data=data, options=options: kind(
                        data, use_stateful_dataloader=True, **options
                    )
                )
            torch.manual_seed(0)
            states_by_loader[f"prepared {where}"] = followed(
                lambda data=data, options=options: accelerator.prepare(
                    DataLoader(data, **options)
                )
            )
    return states_by_loader


PROCESSES = (1,)
