"""Context parallelism: one sequence split over ranks, attention over all of it.

Start with `strategy.py`; `layout.py` (pure) says which positions a rank holds, `attention.py` and `sdpa.py` compute, `masks.py` completes masks.
"""
