"""`hasten estimate-memory`: the memory that a model needs, before it is loaded. Start with `estimate.py`."""
