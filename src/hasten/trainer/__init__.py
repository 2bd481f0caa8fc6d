"""The Trainer: arguments, loop, evaluation, callbacks and metrics, built only on the Accelerator.

Start with `trainer.py`, then `loop.py` (an epoch) and `evaluation.py`; `arguments.py` and `settings.py` hold the user's settings.
"""
