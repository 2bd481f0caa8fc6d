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
    found = [
        [
            isinstance(loader, StatefulDataLoader),
            type(loader.base_dataloader).__name__,
            plain(loader.state_dict()),
        ]
    ]
    for batch in loader:
        found.append([plain(batch), plain(loader.state_dict())])
        if len(found) == 3:
            state = loader.state_dict()
    found.append(plain(loader.state_dict()))
    again = make()
    again.load_state_dict(state)
    return [
        *found,
        [plain(batch) for batch in again],
        [plain(batch) for batch in again],
        plain(again.state_dict()),
    ]


def run() -> object:
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
    )
    found = {}
    for workers in (0, 2):
        for data in (list(range(10)), Stream()):
            options = {"batch_size": 2, "num_workers": workers}
            where = f"{type(data).__name__} {workers}"
            for kind in (DataLoaderShard, DataLoaderDispatcher, SkipDataLoader):
                torch.manual_seed(0)
                found[f"{kind.__name__} {where}"] = followed(
                    lambda kind=kind, data=data, options=options: kind(
                        data, use_stateful_dataloader=True, **options
                    )
                )
            torch.manual_seed(0)
            found[f"prepared {where}"] = followed(
                lambda data=data, options=options: accelerator.prepare(
                    DataLoader(data, **options)
                )
            )
    return found


PROCESSES = (1,)
