"""Data loading: splitting samples over ranks, shuffling, prefetching, and resuming from a position.

Start with `batch_plan.py` (the split, as pure functions) and `loader.py` (the prepared loader). `iterable.py` and `stream.py`
read streams, `dispatch.py` reads on one rank for all, `prefetch.py` copies batches to the device.
"""
