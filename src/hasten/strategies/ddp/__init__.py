"""Data parallelism with a replica of the model on each rank.

Start with `strategy.py`; `buckets.py` saves and restores the order of gradient buckets in checkpoints.
"""
