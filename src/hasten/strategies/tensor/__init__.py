"""Tensor parallelism: layers split over ranks by rows and columns.

Start with `strategy.py`; `plan.py` chooses the layers and their styles, `forwards.py` computes them, and `ops.py` holds the collectives.
"""
