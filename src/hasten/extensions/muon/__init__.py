"""Muon, and the split of a model's parameters between Muon and AdamW: `hasten.optimizers`. Start with `optimizers.py`."""
