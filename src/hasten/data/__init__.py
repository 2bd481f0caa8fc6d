"""Loaders: which rank reads which sample, in which order, ahead of time, and from where after a resume.

Start with `plan.py` (pure: the split), then `loader.py` (what a loop iterates). `iterable.py` and `stream.py` read streams, `dispatch.py` reads on
one rank for all, `prefetch.py` copies batches to the device, `position.py` is what a checkpoint keeps.
"""
