"""Batches that the main process hands out are filled up, whatever `even_batches` says, and end together."""

from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import gather_object


def run() -> object:
    config = DataLoaderConfiguration(dispatch_batches=True, even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader_batches = []
    for length in (1, 3, 10, 11, 12):
        loader = accelerator.prepare(DataLoader(list(range(length)), batch_size=4))
        loader_batches.append(
            [
                [batch.tolist(), loader.end_of_dataloader, loader.remainder]
                for batch in loader
            ]
        )
    return gather_object([loader_batches])


PROCESSES = (1, 2)
