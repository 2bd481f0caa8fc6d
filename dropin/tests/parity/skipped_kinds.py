"""Classes and lengths of loaders without their first batches."""

from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator, skip_first_batches


class Stream(IterableDataset):
    """Numbers, one after another."""

    def __iter__(self) -> object:
        return iter(range(10))


def run() -> object:
    plain = DataLoader(list(range(16)), batch_size=4)
    rows = skip_first_batches(plain, 2)
    stream = Accelerator(cpu=True).skip_first_batches(
        DataLoader(Stream(), batch_size=4), 1
    )
    kinds = [
        type(rows).__name__,
        type(rows.batch_sampler).__name__,
        type(stream).__name__,
    ]
    sampler = rows.batch_sampler
    return [
        kinds,
        len(rows),
        sampler.total_length,
        [x.tolist() for x in rows],
        [x.tolist() for x in stream],
    ]


PROCESSES = (1,)
