"""Tensor parallelism: layers split over ranks by rows and columns.

Start with `strategy.py`; `plan.py` chooses the layers and their styles, `forwards.py` computes them, `ops.py` holds the collectives, and
`sequence.py` and `logits.py` split activations and the loss.
"""
