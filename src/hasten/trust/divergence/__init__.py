"""Ranks compare fingerprints of what they should hold in common.

Start with `sentinel.py` (when and what is compared), then `fingerprint.py`; `divergence.py` (pure) finds the cause.
"""
