"""Optimizers, schedulers and the step clock that says when a window of micro-batches ends.

Start with `clock.py` and `window.py` (accumulation), then `optimizer.py` and `scheduler.py` (what `prepare` returns) and `clip.py`.
`rebind.py` moves an optimizer to sharded parameters by name.
"""
