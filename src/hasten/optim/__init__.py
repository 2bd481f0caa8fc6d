"""Optimizers, schedulers and the step clock, which determines the end of an accumulation window.

Start with `clock.py` (accumulation windows), `window.py` (`divided` and `backpropagate` divide a loss by its
window) and `loss_weights.py` (weighted means), then `optimizer.py`, `scheduler.py` and `clip.py`.
`rebind.py` moves an optimizer to sharded parameters by name.
"""
