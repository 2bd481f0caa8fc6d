"""NaN and inf in losses and gradients: reported with their samples, skipped, or a reason to stop.

Start with `numbers.py`; `first_module.py` finds the first module with a non-finite output.
"""
