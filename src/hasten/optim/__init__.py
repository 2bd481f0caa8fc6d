"""Optimizers, schedulers and the step clock, which determines the end of an accumulation window.

Start with `clock.py` and `window.py` (accumulation), then `optimizer.py`, `scheduler.py` and `clip.py`.
`rebind.py` moves an optimizer to sharded parameters by name.
"""
