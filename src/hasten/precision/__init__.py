"""Compute precision: full, autocast, loss scaling for fp16, and fp8.

Start with `base.py` (the protocol) and `build.py` (the choice); the loss is scaled in `scaler.py`.
"""
