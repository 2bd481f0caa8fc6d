"""Data parallelism with whole copies of the model.

Start with `strategy.py`; `buckets.py` keeps the order of gradient sums over a resume, `retry.py` runs a step again without an exchange.
"""
