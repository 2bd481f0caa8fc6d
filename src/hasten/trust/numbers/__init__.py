"""Losses and gradients that are nan or inf: reported with their samples, skipped, or rolled back.

Start with `numbers.py`; `first_module.py` finds the first module whose output was not finite, `rollback.py` returns to a checkpoint.
"""
