"""Tensor parallelism: layers split over ranks by rows and columns.

Start with `strategy.py`; `plan.py` finds which layer is split how, `ops.py` splits it, `sequence.py` and `logits.py` split activations and the loss.
"""
