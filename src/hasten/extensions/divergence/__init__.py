"""Divergence check: ranks compare fingerprints of values that must be equal.

Start with `divergence_check.py` (schedule of the comparison), then `fingerprint.py`; `divergence.py` (pure) finds the cause.
"""
