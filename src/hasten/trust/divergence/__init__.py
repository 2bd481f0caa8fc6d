"""Divergence check: ranks compare fingerprints of values that must be equal.

Start with `sentinel.py` (schedule of the comparison), then `fingerprint.py`; `divergence.py` (pure) finds the cause.
"""
