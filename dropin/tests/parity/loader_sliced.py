"""A slicing function of one's own for dispatched batches."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, slice_tensors


def run() -> object:
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
    )
    calls = []

    def cut(data, span, process_index=None, num_processes=None):
        calls.append([span.start, span.stop, num_processes])
        return slice_tensors(data, span)

    loader = accelerator.prepare_data_loader(
        DataLoader(TensorDataset(torch.arange(8)), batch_size=2),
        slice_fn_for_dispatch=cut,
    )
    return [[x.tolist() for (x,) in loader]]


PROCESSES = (1, 2)
