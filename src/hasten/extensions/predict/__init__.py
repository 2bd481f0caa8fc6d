"""`hasten predict`: a model applied to all rows of a file, on all processes, in order. Start with `predict.py`."""
