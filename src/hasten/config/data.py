"""Settings of prepared data loaders."""

from typing import Literal

from hasten.config.base import Section, setting, settings

Pad = Literal["least", "full"]
OrderOf = Literal["seed", "torch"]


@settings
class DataLoaderConfiguration(Section):
    """How loaders are split over processes, shuffled, moved and resumed."""

    split_batches: bool = setting(
        False, "the loader's batch size is the global one, split over processes", flags=("split_batches",)
    )
    dispatch_batches: bool | None = setting(
        None, "rank 0 reads the batches and sends each process its slice (default: no)", flags=("dispatch_batches",)
    )
    even_batches: bool = setting(
        True,
        "every process sees the same number of samples, the first ones repeated if needed",
        flags=("even_batches",),
    )
    already_sharded: bool | None = setting(
        None,
        "every process's loader holds its own part of the data (default: recognised where it can be, and compared)",
    )
    pad: Pad = setting(
        "least",
        "how even_batches fills the last step of an epoch: least: up to equal shares; full: up to whole batches",
    )
    order: OrderOf = setting(
        "seed",
        "what shuffling draws from: seed: (seed, epoch); torch: the generator a plain DataLoader draws from",
    )
    use_seedable_sampler: bool = setting(
        True, "shuffle as a function of (seed, epoch), the same on all processes", flags=("use_seedable_sampler",)
    )
    data_seed: int | None = setting(
        None, "seed of the shuffle (default: torch's seed at prepare)", minimum=0, flags=("data_seed",)
    )
    non_blocking: bool = setting(False, "copy batches to the device without waiting", flags=("non_blocking",))
    use_stateful_dataloader: bool = setting(
        False, "use torchdata's StatefulDataLoader", flags=("use_stateful_dataloader",)
    )
    prefetch: int | None = setting(
        None, "batches kept ahead on the device (default: 2 on accelerators, 0 on CPU)", minimum=0, maximum=1024
    )
    pin_memory: bool | None = setting(
        None, "pin batches before they are copied to a GPU (default: when worker processes read them)"
    )
    prefetch_skip_keys: tuple[str, ...] = setting((), "keys of a batch that stay on the host")
