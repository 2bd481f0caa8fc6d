"""Losses of large vocabularies, computed for a few tokens at a time.

`cross_entropy.py` computes the loss; `logits.py` makes existing models use it.
"""
