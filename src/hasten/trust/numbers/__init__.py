"""NaN and inf in losses and gradients: reported with their samples, skipped, or rolled back.

Start with `numbers.py`, which also rolls back to a checkpoint; `first_module.py` finds the first module with a non-finite output.
"""
