"""The Trainer: arguments, loop, evaluation, callbacks and metrics, on the Accelerator alone.

Start with `trainer.py`, then `loop.py` (an epoch) and `evaluation.py`; `arguments.py` and `settings.py` hold what users set.
"""
