"""Compute precision: full, autocast, loss scaling for fp16, and fp8.

Start with `base.py` (the protocol) and `build.py` (the factory); `scaler.py` scales the loss.
"""
